"""A model with a window or a state is credited with a prefix down to a snapshot: what a worker could start behind."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_mesh import Mesh, pair, prompt

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L2, TIER_L3, Tier
from tidemill.mesh.v1.events_pb2 import BlockRemoved, SnapshotsRemoved
from tidemill.mesh.v1.membership_pb2 import ROLE_KVSTORE, ROLE_PREFILL, MembershipRecord
from tidemill.mesh.v1.router_pb2 import PlacePrefillResponse
from tidemill_kvcache.domain_blocks import DomainBlocks
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.events import stored_event
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.index import BlockIndex, TierDepth
from tidemill_router.candidate import ModelFacts
from tidemill_router.resumable import Boundaries

BLOCK = 32
INTERVAL = 4
TOKENS = 31 * BLOCK + 1
HASHES = prompt(0, 31)
P0, STORE = ("p-0", 0), ("kv-0", 0)


def mesh_of_state(*, tells: bool = True, store_tells: bool = True) -> Mesh:
    """One prefill and one decode instance, and a store, of a model with a snapshot each four blocks."""
    mesh = pair()
    mesh.facts = ModelFacts(BLOCK, 10_000, INTERVAL)
    for record in mesh.instances.records.values():
        record.tells_snapshots = tells
    mesh.instances.records["kv-0"] = MembershipRecord(
        instance="kv-0", role=ROLE_KVSTORE, tells_snapshots=store_tells
    )  # fmt: skip
    return mesh


def hold(
    mesh: Mesh, holder: Holder, tier: "Tier.ValueType", first: int, end: int, snapshots: tuple[int, ...] = ()
) -> DomainBlocks:
    """A holder tells of the prompt's blocks from one depth to another, with snapshots at some depths."""
    told = DomainBlocks(mesh.index, holder)
    has_snapshot = [depth in snapshots for depth in range(first + 1, end + 1)]
    parent = HASHES[first - 1] if first else b""
    told.stored(stored_event(parent, HASHES[first:end], tier, has_snapshot=has_snapshot).stored)
    return told


def credited(mesh: Mesh, tokens: int = TOKENS) -> tuple[int, int, int]:
    """Blocks by tier that a placement credits; it is cancelled at once."""
    placed = mesh.place(HASHES[: tokens // BLOCK], tokens=tokens)
    mesh.reservations.end(placed.reservation_id, "cancelled")
    return blocks_of(placed)


def blocks_of(placed: PlacePrefillResponse) -> tuple[int, int, int]:
    cached = placed.expected_cached
    assert cached.l1 % BLOCK == cached.l2 % BLOCK == cached.l3 % BLOCK == 0
    return cached.l1 // BLOCK, cached.l2 // BLOCK, cached.l3 // BLOCK


def test_credit_ends_with_the_last_snapshot_and_with_the_snapshot_alone() -> None:
    mesh = mesh_of_state()
    told = hold(mesh, P0, TIER_L1, 0, 23, snapshots=(8, 20))
    assert credited(mesh) == (20, 0, 0)
    assert credited(mesh, 20 * BLOCK + 1) == (20, 0, 0)
    assert credited(mesh, 20 * BLOCK) == (8, 0, 0), "the last token is always computed"
    told.snapshots_removed(SnapshotsRemoved(block_hashes=HASHES[19], tier=TIER_L1))
    assert credited(mesh) == (8, 0, 0)
    told.snapshots_removed(SnapshotsRemoved(block_hashes=HASHES[7], tier=TIER_L1))
    assert credited(mesh) == (0, 0, 0)


def test_a_block_leaves_with_its_snapshot() -> None:
    mesh = mesh_of_state()
    told = hold(mesh, P0, TIER_L1, 0, 20, snapshots=(8, 20))
    told.removed(BlockRemoved(block_hashes=join_hashes(HASHES[19:15:-1]), tier=TIER_L1))
    told.stored(stored_event(HASHES[15], HASHES[16:20], TIER_L1).stored)
    assert credited(mesh) == (8, 0, 0)


def test_lower_tiers_go_on_from_the_last_snapshot_and_not_from_the_last_block() -> None:
    mesh = mesh_of_state()
    hold(mesh, P0, TIER_L1, 0, 23, snapshots=(8,))
    hold(mesh, P0, TIER_L2, 10, 28, snapshots=(16, 24))
    assert credited(mesh) == (8, 0, 0), "blocks 9 and 10 are in L1 only, where nothing can be resumed behind them"
    hold(mesh, STORE, TIER_L3, 8, 10)
    assert credited(mesh) == (8, 0, 16), "kvstore has what L2 lacks; the snapshot is in L2"
    hold(mesh, P0, TIER_L2, 8, 10)
    assert credited(mesh) == (8, 16, 0)
    hold(mesh, STORE, TIER_L3, 26, 30, snapshots=(28,))
    assert credited(mesh) == (8, 16, 4)


def test_another_instances_memory_counts_down_to_a_snapshot_that_it_has() -> None:
    mesh = mesh_of_state()
    mesh.add("p-1", ROLE_PREFILL)
    mesh.instances.records["p-1"].tells_snapshots = True
    hold(mesh, ("p-1", 0), TIER_L1, 0, 30, snapshots=(12,))
    mesh.report("p-1", waiting_prefill_tokens=50_000)
    placed = mesh.place(HASHES, tokens=TOKENS)
    assert placed.target.domain.instance == "p-0"
    assert blocks_of(placed) == (0, 12, 0)
    assert [(source.holder.domain.instance, source.num_blocks) for source in placed.sources] == [("p-1", 12)]


def test_a_prompt_on_its_way_counts_down_to_a_multiple_of_the_interval() -> None:
    mesh = mesh_of_state()
    mesh.place(HASHES[:15], tokens=15 * BLOCK + 5)
    placed = mesh.place(HASHES, tokens=TOKENS, request_id="second")
    assert blocks_of(placed) == (12, 0, 0)


@pytest.mark.parametrize(("tells", "store_tells", "expected"), [(False, False, (23, 0, 7)), (False, True, (23, 0, 5))])
def test_who_does_not_tell_is_credited_as_before(tells: bool, store_tells: bool, expected: tuple[int, ...]) -> None:
    mesh = mesh_of_state(tells=tells, store_tells=store_tells)
    hold(mesh, P0, TIER_L1, 0, 23)
    hold(mesh, STORE, TIER_L3, 0, 30, snapshots=(28,))
    assert credited(mesh) == expected


def test_a_model_without_state_is_credited_with_each_block() -> None:
    mesh = mesh_of_state()
    mesh.facts = ModelFacts(BLOCK, 10_000)
    hold(mesh, P0, TIER_L1, 0, 23, snapshots=(8,))
    assert credited(mesh) == (23, 0, 0)


@dataclass
class Held:
    """What lies where, by depth."""

    blocks: dict[tuple[Holder, int], set[int]] = field(default_factory=dict)
    snapshots: dict[tuple[Holder, int], set[int]] = field(default_factory=dict)

    def usable(self, first: int, places: list[tuple[Holder, int]], most: int) -> int:
        """As a worker goes on behind the first blocks: one after the other from any place, up to a snapshot."""
        depth, boundary = first, first
        while depth < most and any(depth + 1 in self.blocks.get(place, ()) for place in places):
            depth += 1
            if any(depth in self.snapshots.get(place, ()) for place in places):
                boundary = depth
        return boundary


stretches = st.tuples(
    st.sampled_from([(P0, TIER_L1), (P0, TIER_L2), (STORE, TIER_L3), (("kv-1", 0), TIER_L3)]),
    st.integers(0, 15),
    st.integers(1, 16),
    st.sets(st.integers(1, 31)),
)


@given(told=st.lists(stretches, max_size=8), most=st.integers(0, 31))
@settings(max_examples=300, deadline=None)
def test_boundaries_are_those_that_a_worker_reaches_block_by_block(
    told: list[tuple[tuple[Holder, "Tier.ValueType"], int, int, set[int]]], most: int
) -> None:
    index, held = BlockIndex(1 << 22), Held()
    domains = {holder: DomainBlocks(index, holder) for holder in (P0, STORE, ("kv-1", 0))}
    for (holder, tier), first, count, snapshots in told:
        # L1 is a tree: its blocks go down from a prompt's first one.
        start = 0 if tier == TIER_L1 else first
        depths = range(start + 1, start + count + 1)
        event = stored_event(
            HASHES[start - 1] if start else b"",
            HASHES[start : start + count],
            tier,
            has_snapshot=[depth in snapshots for depth in depths],
        )
        domains[holder].stored(event.stored)
        held.blocks.setdefault((holder, tier), set()).update(depths)
        held.snapshots.setdefault((holder, tier), set()).update(snapshots & set(depths))
    found = index.find(HASHES)
    boundaries = Boundaries(index, index.along(found), most, INTERVAL)
    l1 = held.usable(0, [(P0, TIER_L1)], most)
    l2 = held.usable(l1, [(P0, TIER_L2)], most)
    own = boundaries.own(P0)
    assert own == TierDepth(l1, l2 - l1)
    assert boundaries.in_l2(P0) == held.usable(0, [(P0, TIER_L2)], most)
    places = [(P0, TIER_L2), (STORE, TIER_L3), (("kv-1", 0), TIER_L3)]
    stores = boundaries.of_stores([STORE, ("kv-1", 0)], set())
    assert boundaries.shared(P0, own, stores) == held.usable(own.l1, places, most)
