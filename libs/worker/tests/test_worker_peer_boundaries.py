"""Between instances of a model with sequence state: each gives from the tier that has more to begin behind, and takes
what a placement named, which ends with a snapshot."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from emulated_rank import GROUP, ready

from tidemill.mesh.v1 import common_pb2
from tidemill_engine import messages
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.settings import EngineSettings
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.landing import Landing
from tidemill_worker.peer_source import PeerSource
from tidemill_worker.residents import StoredBlock, Tenants
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.slabs import shape_of
from tidemill_worker.source_plan import Rates

HASHES = [bytes([n]) * 16 for n in range(1, 7)]
STATE = KVGroupSpec(
    name="state",
    kind="state",
    layers=(1,),
    dtype="float32",
    num_heads=2,
    head_values=2,
    snapshot_interval_tokens=2 * WorkerSettings().block_size,
)


def rank(*groups: KVGroupSpec) -> messages.RankReady:
    one = ready(EngineSettings(model_dir="."))
    return msgspec.structs.replace(one, kv_groups=list(groups), num_host_blocks=8, num_host_snapshots=4)


@pytest.mark.parametrize(
    ("groups", "in_l1", "in_l2", "expected"),
    [
        ((GROUP,), (5, ()), (3, ()), (5, 3)),
        ((GROUP, STATE), (5, (2,)), (4, (4,)), (2, 4)),
        ((GROUP, STATE), (5, (2, 4)), (4, (2,)), (4, 2)),
        ((GROUP, STATE), (5, ()), (3, ()), (5, 3)),
    ],
    ids=["no state", "deeper in L2", "deeper in L1", "no snapshot anywhere"],
)
async def test_what_an_instance_could_give_ends_with_a_snapshot(
    groups: tuple[KVGroupSpec, ...],
    in_l1: tuple[int, tuple[int, ...]],
    in_l2: tuple[int, tuple[int, ...]],
    expected: tuple[int, int],
) -> None:
    counts = SimpleNamespace(l2_blocks=lambda *_: None)
    worker: Any = SimpleNamespace(settings=WorkerSettings(l2_policy="off"), counts=counts)
    domain: Any = SimpleNamespace(index=0, epoch="e", up=True, ready=[rank(*groups)])
    stores: Any = SimpleNamespace(usable=dict)
    tiers = DomainTiers(worker, domain, stores, Tenants(), lambda *_: None)
    try:
        count, snapshots = in_l1
        flags = [depth in snapshots for depth in range(1, count + 1)]
        tiers.residents.stored(messages.BlocksStored(b"", HASHES[:count], flags))
        count, snapshots = in_l2
        for depth, block_hash in enumerate(HASHES[:count], 1):
            parent = HASHES[depth - 2] if depth > 1 else b""
            has_snapshot = depth in snapshots
            made = tiers.l2.slots.reserve(StoredBlock(parent, block_hash, has_snapshot), with_snapshot=has_snapshot)
            assert made is not None
            tiers.l2.slots.filled(made)
        assert tiers.reach(HASHES) == expected
        assert tiers.depth(HASHES) == 5
    finally:
        await tiers.close()


@pytest.mark.parametrize(
    ("named_blocks", "expected"), [(5, [3]), (6, [1, 3]), (4, [1]), (2, [])], ids=["boundary", "older", "less", "none"]
)
def test_a_peer_is_taken_to_have_the_snapshot_that_a_placement_ends_with(
    named_blocks: int, expected: list[int]
) -> None:
    """The first block wanted is the prompt's second; snapshots may lie behind its third and its fifth."""
    worker: Any = SimpleNamespace(rates=Rates(), transfers=SimpleNamespace(bytes_per_s=1e9))
    shape = shape_of(rank(GROUP, STATE), 16)
    wanted = messages.OnboardWanted(
        messages.RequestKey("r"), 1, b"", HASHES[1:6], list(range(5)), [-1, 0, -1, 1, -1], 30.0
    )
    landing = Landing(wanted, shape)
    source = common_pb2.BlockSource(num_blocks=named_blocks)
    offer = PeerSource(worker, SimpleNamespace(), source, landing).offer  # type: ignore[arg-type]
    assert [at for at, has in enumerate(offer.has_snapshot) if has] == expected
    assert sum(offer.has) == max(0, named_blocks - 1)
