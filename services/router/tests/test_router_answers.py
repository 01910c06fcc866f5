"""The router's answers over a view of a mesh: who is eligible, what is refused and why, what is reserved."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from placement_mesh import REVISION, Mesh, pair, prompt

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_KVSTORE, ROLE_PREFILL, MembershipRecord
from tidemill.mesh.v1.router_pb2 import PlacePrefillResponse
from tidemill.v1 import errors_pb2
from tidemill_kvcache.domain_blocks import FormatHolder
from tidemill_kvcache.hashing import hash_blocks
from tidemill_kvcache.index import L1, L3
from tidemill_kvcache.kv_format import format_id
from tidemill_mesh.errors import MeshError
from tidemill_router.candidate import Costs
from tidemill_router.reservations import DECODE, PREFILL, SOFT, WHOLE


def code_of(caught: pytest.ExceptionInfo[MeshError]) -> int:
    return caught.value.code


def test_a_placement_names_the_domain_and_is_reserved_with_a_soft_decode_claim() -> None:
    mesh = pair()
    response = mesh.place()
    assert response.target.endpoint == "p-0:1"
    assert response.target.domain == DomainRef(instance="p-0", incarnation="p-0-i", domain=0, epoch="p-0-e")
    assert not response.whole
    assert response.reservation_deadline_s == 9.0
    assert response.predicted_ttft_s == pytest.approx(1.0)
    assert set(response.terms) == {
        "queue", "compute", "fetch_l2", "fetch_peer", "fetch_l3", "staleness", "displaced", "total"
    }  # fmt: skip
    assert mesh.reservations.count_by_kind() == {PREFILL: 1, DECODE: 0, WHOLE: 0, SOFT: 1}
    decode = mesh.place_decode()
    assert decode.target.endpoint == "d-0:1"
    assert mesh.reservations.count_by_kind() == {PREFILL: 1, DECODE: 1, WHOLE: 0, SOFT: 0}


def test_an_instance_is_not_stale_before_its_first_report_can_have_come() -> None:
    mesh = pair()
    mesh.loads.samples.clear()
    assert mesh.place().terms["staleness"] == 0.0
    mesh.clock.now += 60.0
    assert mesh.place(request_id="later").terms["staleness"] == Costs().stale_penalty_s


def test_both_domains_of_one_instance_are_targets_of_their_own() -> None:
    mesh = Mesh()
    mesh.add("p-0", ROLE_PREFILL, domains=2)
    mesh.add("d-0", ROLE_DECODE)
    domains = Counter(mesh.place(request_id=str(i)).target.domain.domain for i in range(10))
    assert domains == {0: 5, 1: 5}, "each reservation lengthens the queue of its own domain"


def test_a_fetch_from_another_instance_is_priced_traced_and_named() -> None:
    """The holder has a queue; the idle instance is expected to fetch from it, and told where."""
    mesh = pair()
    mesh.add("p-1", ROLE_PREFILL)
    hashes = prompt(0, 31)
    mesh.index.stored(("p-1", 0), b"", hashes[:30], L1)
    mesh.report("p-1", waiting_prefill_tokens=5000)
    response = mesh.place(hashes)
    assert response.target.domain.instance == "p-0"
    assert (response.expected_cached.l1, response.expected_cached.l2) == (0, 30 * 32)
    assert response.terms["fetch_peer"] > 0.0
    assert response.predicted_ttft_s == pytest.approx(response.terms["fetch_peer"] + response.terms["compute"])
    assert [source.holder.domain.instance for source in response.sources] == ["p-1"]


def test_the_index_draws_a_prompt_to_its_holder() -> None:
    mesh = pair()
    mesh.add("p-1", ROLE_PREFILL)
    hashes = prompt(0, 31)
    mesh.index.stored(("p-1", 0), b"", hashes[:20], L1)
    response = mesh.place(hashes)
    assert response.target.domain.instance == "p-1"
    assert response.expected_cached.l1 == 640


def test_a_shared_store_counts_for_every_instance() -> None:
    mesh = pair()
    hashes = prompt(0, 31)
    mesh.index.stored(("kv-0", 0), b"", hashes[:20], L3)
    assert mesh.place(hashes).expected_cached.l3 == 640


def glance(mesh: Mesh, hashes: list[bytes], **more: Any) -> PlacePrefillResponse:
    """A placement that is cancelled at once."""
    placed = mesh.place(hashes, **more)
    mesh.reservations.end(placed.reservation_id, "cancelled")
    return placed


def test_blocks_that_lie_in_several_stores_count_as_if_they_were_in_one() -> None:
    mesh = pair()
    hashes = prompt(0, 31)
    for number, block_hash in enumerate(hashes[:24]):
        mesh.index.stored((f"kv-{number % 3}", 0), hashes[number - 1] if number else b"", [block_hash], L3)
    assert glance(mesh, hashes).expected_cached.l3 == 24 * 32
    mesh.index.removed(("kv-1", 0), [hashes[7]], L3)
    assert glance(mesh, hashes).expected_cached.l3 == 7 * 32
    assert glance(mesh, hashes).stores == ["kv-0", "kv-1", "kv-2"]
    # What a store that drains has is not asked for.
    mesh.instances.records["kv-2"] = MembershipRecord(instance="kv-2", role=ROLE_KVSTORE, draining=True)
    placed = glance(mesh, hashes)
    assert (placed.expected_cached.l3, placed.stores) == (2 * 32, ["kv-0", "kv-1"])
    assert glance(mesh, prompt(500, 31)).stores == []
    # Whether loading pays is for the target to say, which it cannot of blocks that it does not find.
    mesh.router.costs = replace(mesh.router.costs, fetch_latency_s=1000.0)
    placed = glance(mesh, hashes)
    assert (placed.expected_cached.l3, placed.stores) == (0, ["kv-0", "kv-1"])
    # Nor is it known what the target has lost a moment ago.
    mesh.index.stored(("p-0", 0), b"", hashes[:24], L1)
    placed = glance(mesh, hashes)
    assert (placed.expected_cached.l1, placed.stores) == (24 * 32, ["kv-0", "kv-1"])


def test_blocks_in_a_store_count_only_for_instances_that_can_load_them() -> None:
    exact, rounded = "v1/b32/kv:paged:float32:2x2x8", "v1/b32/kv:paged:bfloat16:2x2x8"
    mesh = Mesh()
    mesh.add("p-exact", ROLE_PREFILL, kv_format=exact)
    mesh.add("p-rounded", ROLE_PREFILL, kv_format=rounded)
    mesh.add("p-older", ROLE_PREFILL)
    mesh.add("d-0", ROLE_DECODE, kv_format=exact)
    hashes = prompt(0, 31)
    mesh.index.stored(FormatHolder("kv-0", 0, format_id(exact)), b"", hashes[:20], L3)
    mesh.index.stored(FormatHolder("kv-1", 0, format_id(rounded)), b"", hashes[:10], L3)
    mesh.index.stored(("kv-older", 0), b"", hashes[:4], L3)

    def credited(name: str) -> int:
        others = {"p-exact", "p-rounded", "p-older"} - {name}
        placed = glance(mesh, hashes, excluded_instances=others)
        assert placed.target.domain.instance == name
        return placed.expected_cached.l3 // 32

    # Copies of another precision are not read. One whose store does not say its form is told of to everybody.
    assert (credited("p-exact"), credited("p-rounded"), credited("p-older")) == (20, 10, 20)
    assert glance(mesh, hashes).target.domain.instance != "p-rounded"


def test_simultaneous_requests_with_one_cold_head_stay_together() -> None:
    mesh = pair()
    for name in ("p-1", "p-2", "p-3"):
        mesh.add(name, ROLE_PREFILL)
    head = prompt(0, 256)
    places = [
        mesh.place([*head, *hash_blocks(head[-1], [1000 + i], 1)], 256 * 32 + 40, request_id=str(i)).target.domain
        for i in range(16)
    ]
    assert len({domain.instance for domain in places}) == 1


def test_cold_prompts_that_arrive_together_spread() -> None:
    mesh = pair()
    for name in ("p-1", "p-2", "p-3"):
        mesh.add(name, ROLE_PREFILL)
    places = Counter(mesh.place(prompt(1000 * i, 31), request_id=str(i)).target.domain.instance for i in range(40))
    assert max(places.values()) <= 13


def test_fenced_draining_and_excluded_instances_are_not_chosen() -> None:
    mesh = pair()
    mesh.add("p-1", ROLE_PREFILL)
    mesh.add("p-2", ROLE_PREFILL, draining=True)
    mesh.fences.fence("p-0", "p-0-i")
    assert {mesh.place(request_id=str(i)).target.domain.instance for i in range(10)} == {"p-1"}
    mesh.report("p-1", draining=True)
    assert mesh.place(request_id="x").whole
    mesh.report("p-1")
    assert mesh.place(request_id="y", excluded_instances=["p-1"]).whole


def test_an_instance_that_still_loads_gets_nothing() -> None:
    mesh = pair()
    del mesh.instances.records["p-0"].domains[:]
    assert mesh.place().whole


def test_without_prefill_instances_a_decode_instance_does_both_and_says_so() -> None:
    mesh = Mesh()
    mesh.add("d-0", ROLE_DECODE)
    response = mesh.place()
    assert (response.whole, response.terms["degraded"]) == (True, 1.0)
    assert mesh.reservations.count_by_kind()[WHOLE] == 1


def test_a_nearly_cached_prompt_goes_to_its_decode_instance_alone() -> None:
    mesh = pair()
    hashes = prompt(0, 31)
    mesh.index.stored(("d-0", 0), b"", hashes, L1)
    response = mesh.place(hashes, 31 * 32 + 8)
    assert response.whole
    assert response.target.domain.instance == "d-0"
    assert "degraded" not in response.terms
    mesh.report("d-0", available_blocks=20)
    assert not mesh.place(hashes, 31 * 32 + 8, request_id="other").whole


def test_a_missing_role_is_named() -> None:
    mesh = Mesh()
    mesh.add("p-0", ROLE_PREFILL)
    with pytest.raises(MeshError, match=r"no decode instance .* rev-a") as caught:
        mesh.place()
    assert code_of(caught) == errors_pb2.ERROR_CODE_UNAVAILABLE
    assert caught.value.retry_after_s > 0
    with pytest.raises(MeshError, match="no decode instance"):
        mesh.place_decode()


def test_only_a_revision_that_never_was_is_not_found() -> None:
    mesh = pair()
    with pytest.raises(MeshError) as caught:
        mesh.place(model_revision="other")
    assert code_of(caught) == errors_pb2.ERROR_CODE_MODEL_NOT_FOUND
    mesh.instances.records.clear()
    with pytest.raises(MeshError) as caught:
        mesh.place()
    assert code_of(caught) == errors_pb2.ERROR_CODE_UNAVAILABLE
    with pytest.raises(MeshError) as caught:
        Mesh().place(model_revision="other")
    assert code_of(caught) == errors_pb2.ERROR_CODE_UNAVAILABLE, "a mesh without workers knows of no model"


def test_each_model_has_its_own_instances() -> None:
    mesh = pair()
    mesh.add("p-b", ROLE_PREFILL, revision="rev-b")
    mesh.add("d-b", ROLE_DECODE, revision="rev-b")
    for i in range(10):
        assert mesh.place(request_id=str(i), model_revision="rev-b").target.domain.instance == "p-b"
        assert mesh.place_decode(request_id=str(i), model_revision="rev-b").target.domain.instance == "d-b"


def test_wrong_fields_are_named() -> None:
    mesh = pair()
    for change, field_name in (
        ({"tokens": 0}, "prompt_tokens"),
        ({"model_revision": ""}, "model_revision"),
    ):
        with pytest.raises(MeshError) as caught:
            mesh.place(**change)
        assert (code_of(caught), caught.value.field) == (errors_pb2.ERROR_CODE_INVALID_ARGUMENT, field_name)
    with pytest.raises(MeshError) as caught:
        mesh.place([b"short"])
    assert caught.value.field == "block_hashes"
    assert len(mesh.reservations) == 0


def test_a_prompt_that_no_pool_can_hold_is_refused_with_the_limit() -> None:
    mesh = pair()
    mesh.report("d-0", total_blocks=10, available_blocks=10)
    mesh.place(tokens=319)
    with pytest.raises(MeshError) as caught:
        mesh.place(tokens=320)
    assert code_of(caught) == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG
    assert caught.value.limit == "319 tokens"


def test_a_queue_beyond_the_limit_is_refused_with_a_time_to_retry() -> None:
    mesh = pair()
    mesh.report("p-0", waiting_prefill_tokens=100_000)
    with pytest.raises(MeshError) as caught:
        mesh.place()
    assert code_of(caught) == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s == pytest.approx(40.0)
    assert len(mesh.reservations) == 0


def test_load_of_an_older_epoch_does_not_count() -> None:
    mesh = pair()
    mesh.add("p-1", ROLE_PREFILL)
    mesh.report("p-0", epoch="old", waiting_prefill_tokens=10)
    (candidate,) = [c for c in mesh.view.candidates(ROLE_PREFILL, REVISION) if c.key[0] == "p-0"]
    assert candidate.load.waiting_prefill_tokens == 0
    mesh.instances.connected = False
    (candidate,) = [c for c in mesh.view.candidates(ROLE_PREFILL, REVISION) if c.key[0] == "p-0"]
    assert candidate.domain.epoch == "old", "while etcd is away the worker's own reports know best"


def test_placement_works_before_the_model_card_is_there() -> None:
    mesh = pair()
    mesh.facts = None
    hashes = prompt(0, 31)
    mesh.index.stored(("p-0", 0), b"", hashes[:20], L1)
    assert mesh.place(hashes).expected_cached.l1 == 640


def test_old_load_reports_do_not_stop_placement() -> None:
    mesh = pair()
    mesh.clock.now += 3600
    response = mesh.place()
    assert response.terms["staleness"] == pytest.approx(2.0)


def test_a_request_counts_until_a_step_that_began_after_it_is_reported() -> None:
    mesh = pair()

    def queue() -> int:
        (candidate,) = mesh.view.candidates(ROLE_PREFILL, REVISION)
        return candidate.claims.prefill_tokens

    mesh.clock.now += 10
    mesh.report("p-0", waiting_prefill_tokens=1)
    mesh.clock.now += 0.5
    mesh.place()
    for _ in range(4):
        mesh.clock.now += 0.25
        mesh.report("p-0", waiting_prefill_tokens=1)
        assert queue() == 1000, "the sample is only repeated"
    mesh.report("p-0", waiting_prefill_tokens=2)
    assert queue() == 1000, "the step that ended now began before the request came"
    mesh.clock.now += 1.0
    mesh.report("p-0", waiting_prefill_tokens=3)
    assert queue() == 0


def test_reservations_fill_a_decode_instance_up_to_its_high_water_mark() -> None:
    mesh = pair()
    mesh.add("d-1", ROLE_DECODE)
    mesh.report("d-0", decode_step_s=0.001)
    mesh.report("d-1", decode_step_s=0.1)
    places = [mesh.place_decode(request_id=str(i)).target.domain.instance for i in range(40)]
    assert places[:20] == ["d-0"] * 20
    assert places[-1] == "d-1"
    mesh.report("d-1", available_blocks=10, decode_step_s=0.1)
    assert mesh.place_decode(request_id="last").terms["over_high_water"] == 1.0
