"""Nothing is placed on a pair of instances between which no KV arrives, or damaged, while there is another way."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_mesh import Mesh, prompt

from tidemill.mesh.v1.common_pb2 import DomainRef, Target
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_kvcache.index import L1
from tidemill_mesh.errors import MeshError
from tidemill_router.no_hand_overs import NoHandOvers


def mesh_of(prefills: Sequence[str], decodes: Sequence[str]) -> Mesh:
    mesh = Mesh()
    for name in prefills:
        mesh.add(name, ROLE_PREFILL)
    for name in decodes:
        mesh.add(name, ROLE_DECODE)
    return mesh


def target(name: str) -> Target:
    return Target(domain=DomainRef(instance=name, incarnation=f"{name}-i", epoch=f"{name}-e"), endpoint=f"{name}:1")


def decodes_of(mesh: Mesh, prefill: str, times: int = 12) -> set[str]:
    """Where requests of a prefill instance go."""
    placed = [mesh.place_decode(request_id=f"{prefill}-{i}", prefill=target(prefill)) for i in range(times)]
    return {response.target.domain.instance for response in placed}


def prefills_of(mesh: Mesh, times: int = 12) -> set[str]:
    return {mesh.place(request_id=f"r-{i}").target.domain.instance for i in range(times)}


def test_a_decode_instance_gets_no_kv_of_a_source_that_it_reports_and_all_of_others() -> None:
    mesh = mesh_of(["p-0", "p-1"], ["d-0", "d-1"])
    assert decodes_of(mesh, "p-0") == {"d-0", "d-1"}
    mesh.report("d-0", quarantined=["p-0"])
    assert decodes_of(mesh, "p-0") == {"d-1"}
    assert "d-0" in decodes_of(mesh, "p-1")
    assert prefills_of(mesh) == {"p-0", "p-1"}, "another decode instance takes its KV"
    assert mesh.view.num_quarantined_pairs == 1
    mesh.report("d-0")
    assert "d-0" in decodes_of(mesh, "p-0")


def test_a_prefill_instance_whose_kv_nobody_takes_gets_no_prompt() -> None:
    mesh = mesh_of(["p-0", "p-1"], ["d-0", "d-1"])
    mesh.report("d-0", quarantined=["p-0", "gone"])
    mesh.report("d-1", quarantined=["p-0"])
    assert prefills_of(mesh) == {"p-1"}


def test_without_another_prefill_instance_decode_computes_the_prompt_itself() -> None:
    mesh = mesh_of(["p-0"], ["d-0"])
    mesh.report("d-0", quarantined=["p-0"])
    response = mesh.place()
    assert (response.target.domain.instance, response.whole) == ("d-0", True)
    assert response.terms["degraded"] == 1.0


def test_kv_that_is_computed_already_is_tried_once_more_but_no_running_request_moves_over_the_pair() -> None:
    mesh = mesh_of(["p-0"], ["d-0", "d-1"])
    mesh.report("d-0", quarantined=["p-0", "d-1"])
    mesh.report("d-1", quarantined=["p-0"])
    assert decodes_of(mesh, "p-0") == {"d-0", "d-1"}
    with pytest.raises(MeshError, match="room"):
        mesh.place_decode(request_id="moves", prefill=target("d-1"), needs_room=True, excluded_instances=["d-1"])


def test_the_likely_decode_instance_is_one_that_takes_the_kv() -> None:
    mesh = mesh_of(["p-0"], ["d-0", "d-1"])
    mesh.report("d-0", quarantined=["p-0"])
    for i in range(6):
        mesh.place(request_id=f"r-{i}")
    claimed = {name: mesh.reservations.claims((name, 0), float("-inf")).blocks for name in ("d-0", "d-1")}
    assert claimed["d-0"] == 0
    assert claimed["d-1"] > 0


def test_a_source_of_blocks_is_not_named_to_one_that_gets_them_damaged() -> None:
    mesh = mesh_of(["p-0", "p-1"], ["d-0"])
    hashes = prompt(0, 31)
    mesh.index.stored(("p-1", 0), b"", hashes[:30], L1)
    mesh.report("p-1", waiting_prefill_tokens=5000)
    assert [source.holder.domain.instance for source in mesh.place(hashes, request_id="a").sources] == ["p-1"]
    mesh.report("p-0", quarantined=["p-1"])
    response = mesh.place(hashes, request_id="b", excluded_instances=["p-1"])
    assert response.target.domain.instance == "p-0"
    assert not response.sources
    assert response.terms["fetch_peer"] == 0.0


def silent(*names: str) -> list[DomainRef]:
    return [target(name).domain for name in names]


def test_a_decode_instance_gets_no_kv_of_a_run_that_does_not_reach_it() -> None:
    mesh = mesh_of(["p-0", "p-1"], ["d-0", "d-1"])
    mesh.report("d-0", silent=silent("p-0"))
    assert decodes_of(mesh, "p-0") == {"d-1"}
    assert "d-0" in decodes_of(mesh, "p-1")
    assert prefills_of(mesh) == {"p-0", "p-1"}, "another decode instance takes its KV"
    assert mesh.view.num_quarantined_pairs == 1
    mesh.report("d-0", silent=[DomainRef(instance="p-0", incarnation="p-0-i", epoch="a run before")])
    assert decodes_of(mesh, "p-0") == {"d-0", "d-1"}, "it has been replaced"


def test_a_prefill_instance_that_reaches_nobody_gets_no_prompt_whatever_each_says_of_it() -> None:
    mesh = mesh_of(["p-0", "p-1"], ["d-0", "d-1"])
    mesh.report("d-0", silent=silent("p-0"))
    mesh.report("d-1", quarantined=["p-0"])
    assert prefills_of(mesh) == {"p-1"}


NAMES = (["p-0", "p-1", "p-2"], ["d-0", "d-1"])
SHUT = st.dictionaries(st.sampled_from(NAMES[1]), st.sets(st.sampled_from(NAMES[0])))


@given(SHUT, SHUT)
def test_whatever_is_shut_every_request_is_placed_on_an_open_pair_or_on_none_and_the_last_is_not_shut_silently(
    damaged: dict[str, set[str]], unheard: dict[str, set[str]]
) -> None:
    mesh, step = mesh_of(*NAMES), NoHandOvers()
    for name in NAMES[1]:
        mesh.report(name, quarantined=sorted(damaged.get(name, ())), silent=silent(*unheard.get(name, ())))
    step.observe(mesh.view)
    shut = {(p, d) for said in (damaged, unheard) for d, sources in said.items() for p in sources}
    is_all = len(shut) == len(NAMES[0]) * len(NAMES[1])
    assert mesh.view.num_quarantined_pairs == len(shut)
    for i in range(6):
        placed = mesh.place(request_id=f"r-{i}")
        assert placed.whole == is_all
        assert step.num_on == is_all
        if not placed.whole:
            source = placed.target
            decode = mesh.place_decode(request_id=f"r-{i}", prefill=source).target.domain.instance
            assert (source.domain.instance, decode) not in shut
    for name in NAMES[1]:
        mesh.report(name)
    step.observe(mesh.view)
    assert step.num_on == 0
    assert not mesh.place().whole
