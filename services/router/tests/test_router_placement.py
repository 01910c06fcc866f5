"""Placement as pure functions: predicted seconds, ties, room, staleness."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import Candidate, Claims, Costs, ModelFacts, staleness_s
from tidemill_router.decode_placement import DecodeNeed, estimate_decode, place_decode, place_whole
from tidemill_router.prefill_placement import Warmth, estimate_prefill, place_prefill

COSTS = Costs()
FACTS = ModelFacts(block_size=32, kv_bytes_per_token=10_000)


def target(name: str, *, age_s: float = 0.1, claims: Claims = Claims(), **load: float) -> Candidate:  # noqa: B008
    """A target with 1,000 blocks, all available, a prefill rate of 1,000 tokens/s and steps of 20 ms."""
    values = {"total_blocks": 1000, "available_blocks": 1000, "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.02}
    report = LoadReport(**{**values, **load})
    return Candidate((name, 0), DomainRef(instance=name), f"{name}:1", 1000, report, age_s, claims=claims)


def chosen(candidates: list[Candidate], tokens: int, warmth: dict[str, Warmth], seed: int = 0) -> str:
    by_key = {(name, 0): value for name, value in warmth.items()}
    return place_prefill(candidates, tokens, FACTS, by_key, COSTS, random.Random(seed)).candidate.key[0]


def test_an_idle_cold_mesh_spreads_its_prompts() -> None:
    names = Counter(chosen([target("a"), target("b"), target("c")], 1000, {}, seed) for seed in range(300))
    assert min(names.values()) > 60


def test_a_warm_instance_wins_until_its_queue_is_longer_than_the_saving() -> None:
    warmth = {"a": Warmth(TierDepth(l1=25))}
    assert chosen([target("a"), target("b")], 1000, warmth) == "a"
    assert chosen([target("a", waiting_prefill_tokens=500), target("b")], 1000, warmth) == "a"
    assert chosen([target("a", waiting_prefill_tokens=2000), target("b")], 1000, warmth) == "b"


def test_one_shared_first_block_does_not_draw_all_prompts_to_its_holder() -> None:
    warmth = {"a": Warmth(TierDepth(l1=1))}
    names = Counter(chosen([target("a"), target("b"), target("c")], 1000, warmth, seed) for seed in range(300))
    assert names["a"] < 150


def test_reservations_since_the_report_count_as_queue() -> None:
    busy = target("a", claims=Claims(prefill_tokens=3000))
    assert chosen([busy, target("b")], 1000, {}) == "b"
    estimate = estimate_prefill(busy, 1000, FACTS, Warmth(), COSTS)
    assert estimate.queue_s == pytest.approx(3.0)
    assert estimate.compute_s == pytest.approx(1.0)
    assert estimate.terms()["total"] == pytest.approx(sum(estimate.terms().values()) / 2)


def test_a_head_that_is_being_computed_is_not_computed_elsewhere_too() -> None:
    leader = target("a", claims=Claims(prefill_tokens=8000))
    warmth = {"a": Warmth(pending_blocks=250)}
    assert chosen([leader, target("b"), target("c")], 8100, warmth) == "a"


def test_the_reported_queue_shrinks_while_a_step_runs_but_not_below_half() -> None:
    candidate = target("a", waiting_prefill_tokens=2000)
    waits = [
        estimate_prefill(replace(candidate, unchanged_s=seconds), 100, FACTS, Warmth(), COSTS).queue_s
        for seconds in (0.0, 0.5, 3600.0)
    ]
    assert waits == pytest.approx([2.0, 1.5, 1.0])


def test_at_least_the_last_token_is_computed() -> None:
    estimate = estimate_prefill(target("a"), 320, FACTS, Warmth(TierDepth(l1=10)), COSTS)
    assert (estimate.cached_l1_tokens, estimate.uncached_tokens) == (319, 1)


def test_blocks_in_l3_are_fetched_only_where_that_is_quicker_than_computing() -> None:
    warmth = Warmth(shared_l3_blocks=20)
    fast = estimate_prefill(target("a", transfer_bytes_per_s=1e9), 1000, FACTS, warmth, COSTS)
    assert (fast.cached_l3_tokens, fast.uncached_tokens) == (640, 360)
    assert 0 < fast.fetch_l3_s < 0.1
    slow = estimate_prefill(target("a", transfer_bytes_per_s=1e6), 1000, FACTS, warmth, COSTS)
    assert (slow.cached_l3_tokens, slow.uncached_tokens, slow.fetch_l3_s) == (0, 1000, 0.0)


def test_l3_makes_an_idle_cold_instance_nearly_as_good_as_a_busy_warm_one() -> None:
    warm, cold = target("a", waiting_prefill_tokens=300), target("b")
    everywhere = {"a": Warmth(TierDepth(l1=25), shared_l3_blocks=25), "b": Warmth(shared_l3_blocks=25)}
    assert chosen([warm, cold], 1000, everywhere) == "b"
    assert chosen([warm, cold], 1000, {"a": Warmth(TierDepth(l1=25))}) == "a"


def test_l2_blocks_follow_l1_blocks() -> None:
    estimate = estimate_prefill(target("a"), 1000, FACTS, Warmth(TierDepth(l1=5, l2=10, l3=5)), COSTS)
    assert (estimate.cached_l1_tokens, estimate.cached_l2_tokens, estimate.cached_l3_tokens) == (160, 320, 160)


def test_stale_load_costs_a_bounded_penalty_and_never_excludes() -> None:
    ages = [0.1, 1.0, 2.0, 5.0, 10.0, 100.0, float("inf")]
    penalties = [staleness_s(target("a", age_s=age), COSTS) for age in ages]
    assert penalties == sorted(penalties)
    assert penalties[0] == penalties[1] == 0.0
    assert penalties[-1] == COSTS.stale_penalty_s
    assert chosen([target("a", age_s=float("inf"))], 1000, {}) == "a"
    assert chosen([target("a", age_s=100.0), target("b")], 1000, {}) == "b"


@given(
    queue=st.integers(0, 10**7),
    tokens=st.integers(1, 10**6),
    depth=st.builds(TierDepth, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000)),
    pending=st.integers(0, 5000),
    shared=st.integers(0, 5000),
    age=st.floats(0, 1e6),
    unchanged=st.floats(0),
    rate=st.floats(0, 1e6),
)
def test_predictions_are_finite_and_cover_the_prompt(
    queue: int, tokens: int, depth: TierDepth, pending: int, shared: int, age: float, unchanged: float, rate: float
) -> None:
    candidate = target("a", age_s=age, waiting_prefill_tokens=queue, prefill_tokens_per_s=rate)
    candidate = replace(candidate, unchanged_s=unchanged)
    estimate = estimate_prefill(candidate, tokens, FACTS, Warmth(depth, pending, shared), COSTS)
    cached = estimate.cached_l1_tokens + estimate.cached_l2_tokens + estimate.cached_l3_tokens
    assert cached + estimate.uncached_tokens == tokens
    assert estimate.uncached_tokens >= 1
    assert all(0.0 <= value < float("inf") for value in estimate.terms().values())


NEED = DecodeNeed(context_tokens=1000, max_tokens=100)


def decode(candidates: list[Candidate], held: dict[str, int] | None = None, need: DecodeNeed = NEED) -> str:
    depths = {(name, 0): TierDepth(l1=blocks) for name, blocks in (held or {}).items()}
    return place_decode(candidates, need, FACTS, depths, COSTS, random.Random(0)).candidate.key[0]


def test_decode_goes_where_steps_are_short() -> None:
    assert decode([target("a", decode_step_s=0.05), target("b", decode_step_s=0.02)]) == "b"
    crowded = target("a", claims=Claims(sequences=20))
    assert decode([crowded, target("b")]) == "b"


def test_an_instance_without_measures_is_taken_to_be_like_its_peers() -> None:
    new = target("new", decode_step_s=0.0)
    assert decode([target("a", decode_step_s=0.001, running_requests=0), new]) in ("a", "new")
    crowded = target("a", decode_step_s=0.001, claims=Claims(sequences=3))
    assert decode([crowded, new]) == "new"
    cold = target("new", prefill_tokens_per_s=0.0)
    assert chosen([target("a", prefill_tokens_per_s=50_000.0, waiting_prefill_tokens=1000), cold], 1000, {}) == "new"


def test_an_idle_instance_that_was_slow_once_is_tried_again() -> None:
    slow, quick = target("slow", decode_step_s=0.2), target("quick", claims=Claims(sequences=3))
    assert decode([slow, quick]) == "quick"
    assert decode([replace(slow, unchanged_s=600.0), quick]) == "slow"
    slow = target("slow", prefill_tokens_per_s=100.0)
    quick = target("quick", waiting_prefill_tokens=1000)
    assert chosen([slow, quick], 1000, {}) == "quick"
    assert chosen([replace(slow, unchanged_s=600.0), quick], 1000, {}) == "slow"


def test_held_blocks_save_transfer_time() -> None:
    slow_links = [target("a", transfer_bytes_per_s=2e6), target("b", transfer_bytes_per_s=2e6)]
    assert decode(slow_links, {"b": 31}) == "b"
    estimate = estimate_decode(slow_links[0], NEED, FACTS, TierDepth(l1=31), COSTS)
    assert estimate.transfer_s == pytest.approx(8 * 10_000 / 2e6)


def test_an_instance_above_the_high_water_mark_is_left_out_unless_all_are() -> None:
    full = target("a", available_blocks=120, decode_step_s=0.001)
    assert decode([full, target("b", decode_step_s=0.5)]) == "b"
    assert decode([full]) == "a"
    reserved = target("a", claims=Claims(blocks=880), decode_step_s=0.001)
    assert decode([reserved, target("b", decode_step_s=0.5)]) == "b"


def test_a_full_batch_is_left_out_unless_all_are() -> None:
    full = target("a", running_requests=6, waiting_requests=2, max_num_seqs=8, decode_step_s=0.001)
    assert decode([full, target("b", decode_step_s=0.5)]) == "b"
    assert decode([full]) == "a"


def test_a_prompt_that_a_decode_instance_nearly_holds_goes_there_whole() -> None:
    need = DecodeNeed(context_tokens=32 * 30 + 10, max_tokens=50)
    depths = {("a", 0): TierDepth(l1=30)}

    def whole(candidate: Candidate, costs: Costs = COSTS, depth: dict[tuple[str, int], TierDepth] = depths) -> bool:
        return place_whole([candidate], need, FACTS, depth, costs, random.Random(0)) is not None

    assert whole(target("a"))
    assert not whole(target("a"), replace(COSTS, direct_uncached_tokens=0))
    assert not whole(target("a"), depth={("a", 0): TierDepth(l1=29)})
    assert not whole(target("a", available_blocks=50))
    assert not whole(target("a", running_requests=8, max_num_seqs=8))
    assert not whole(target("a", slo_load=1.5))


@given(
    available=st.integers(-5, 1000),
    context=st.integers(1, 10**6),
    max_tokens=st.integers(0, 10**6),
    held=st.integers(0, 10**5),
    claims=st.builds(Claims, st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 10**6)),
)
def test_decode_predictions_are_finite(
    available: int, context: int, max_tokens: int, held: int, claims: Claims
) -> None:
    candidate = target("a", available_blocks=available, claims=claims)
    need = DecodeNeed(context, max_tokens)
    estimate = estimate_decode(candidate, need, FACTS, TierDepth(l1=held), COSTS)
    assert all(0.0 <= value < float("inf") for value in estimate.terms().values())
