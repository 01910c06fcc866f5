"""What L1 holds and when it is written down: chains, tenants, hits, policies."""

import pytest

from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages import BlocksStored, OnboardWanted, RequestKey
from tidemill_mesh.errors import MeshError
from tidemill_worker.landing import Landing
from tidemill_worker.residents import Residents, Tenants
from tidemill_worker.slabs import KVShape
from tidemill_worker.write_down import WriteDown


def h(number: int) -> bytes:
    return bytes([number]) * 16


def run(parent: int, *numbers: int, snapshots: tuple[int, ...] = ()) -> BlocksStored:
    return BlocksStored(h(parent) if parent else b"", [h(n) for n in numbers], [n in snapshots for n in numbers])


def test_blocks_belong_to_the_tenant_whose_prompt_began_with_their_first_one() -> None:
    tenants = Tenants()
    tenants.submitted(h(1), "acme")
    residents = Residents(tenants)
    residents.stored(run(0, 1, 2))
    assert [b.tenant for b in residents.stored(run(2, 3))] == ["acme"]
    assert [b.depth for b in residents.stored(run(3, 4, 5))] == [4, 5]
    assert [b.tenant for b in residents.stored(run(0, 9))] == [""]
    assert residents.leading([h(1), h(2), h(8), h(3)]) == 2


def test_a_prefix_is_worth_giving_away_down_to_its_last_snapshot() -> None:
    residents, hashes = Residents(Tenants()), [h(n) for n in range(1, 6)]
    residents.stored(run(0, 1, 2, 3, 4, 5, snapshots=(2, 4)))
    assert [residents.last_snapshot(hashes[:count]) for count in range(6)] == [0, 0, 2, 2, 4, 4]
    residents.snapshots_dropped([h(4), h(9)])
    assert residents.last_snapshot(hashes) == 2
    residents.stored(run(3, 4, snapshots=(4,)))
    assert residents.last_snapshot(hashes) == 4


def test_the_hottest_prefix_ends_where_its_hits_were_still_shared() -> None:
    residents = Residents(Tenants())
    residents.stored(run(0, 1, 2, 3))
    residents.stored(run(2, 4))
    for tail in (3, 3, 4):
        residents.hit([h(1), h(2), h(tail)])
    residents.hit([h(1), h(7)])
    found = [(p.block_hash, p.num_blocks, p.hits) for p in residents.hottest(10)]
    assert found == [(h(3), 3, 2), (h(4), 3, 1), (h(1), 1, 4)], "nothing ended at the second block"
    residents.hit([h(1), h(2)])
    residents.hit([h(1), h(2)])
    assert [(p.block_hash, p.hits, p.weight) for p in residents.hottest(2)] == [(h(3), 2, 6), (h(2), 5, 4)]


def test_each_policy_names_the_blocks_that_are_to_be_copied_now() -> None:
    residents = Residents(Tenants())
    policies = {name: WriteDown(name, 2, residents) for name in ("write_through", "after_hits", "on_eviction", "off")}
    blocks = residents.stored(run(0, 1, 2, 3))

    def copied(what: str, argument: object) -> dict[str, list[bytes]]:
        return {name: [b.block_hash for b in getattr(policy, what)(argument)] for name, policy in policies.items()}

    none: dict[str, list[bytes]] = {name: [] for name in policies}
    assert copied("stored", blocks) == none | {"write_through": [h(1), h(2), h(3)]}
    assert copied("hit", residents.hit([h(1), h(2)])) == none
    assert copied("hit", residents.hit([h(1)])) == none | {"after_hits": [h(1)]}
    assert copied("hit", residents.hit([h(1)])) == none, "once is enough"
    assert copied("cooling", [h(3), h(2), h(9)]) == none | {"on_eviction": [h(2), h(3)]}
    again = residents.stored(run(0, 1, snapshots=(1,)))
    assert copied("stored", again)["after_hits"] == [h(1)], "with the snapshot that it lacked"


STATE = KVGroupSpec(name="s", kind="state", layers=(0,), dtype="float32", num_heads=1, head_values=1)
PAGED = KVGroupSpec(name="p", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=1)


def landing(*groups: KVGroupSpec) -> Landing:
    wanted = OnboardWanted(RequestKey("r"), 2, h(9), [h(n) for n in range(4)], [10, 11, 12, 13], [-1, 20, -1, 21], 1.0)
    return Landing(wanted, KVShape(groups, 16, "float32"))


def test_only_a_leading_run_that_has_arrived_is_answered() -> None:
    places = landing(PAGED)
    places.landed([0, 1], [-1, -1], "l2")
    places.landed([3], [-1], "l3")
    answer = places.answer()
    assert (answer.num_blocks, answer.num_l2_blocks, answer.snapshot_boundary_blocks) == (2, 2, 0)
    places.landed([2], [-1], "peer")
    answer = places.answer()
    assert (answer.num_blocks, answer.num_l2_blocks) == (4, 3)
    assert places.arrived(4) == {"l2": 2, "peer": 1, "l3": 1}


def test_with_sequence_state_the_answer_ends_at_the_last_snapshot_that_arrived() -> None:
    places = landing(PAGED, STATE)
    places.landed([0, 1, 2, 3], [-1, 20, -1, -1], "l3")
    answer = places.answer()
    assert (answer.num_blocks, answer.snapshot_boundary_blocks) == (2, 4)
    without = landing(PAGED, STATE)
    without.landed([0, 1, 2, 3], [-1, -1, -1, -1], "l3")
    assert without.answer().num_blocks == 0, "blocks without their snapshot are of no use"


def test_a_snapshot_that_has_no_place_to_go_to_is_refused() -> None:
    places = landing(PAGED, STATE)
    assert places.places_of([0, 1, 3], [False, True, False]) == [-1, 20, -1]
    with pytest.raises(MeshError, match="no slot"):
        places.places_of([0], [True])
