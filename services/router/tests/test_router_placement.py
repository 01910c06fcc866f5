"""Placement as pure functions: predicted seconds, ties, room, staleness."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport, StepCost
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import Candidate, Claims, Costs, ModelFacts, prefill_rate, staleness_s
from tidemill_router.computed import ComputedPrompts
from tidemill_router.decode_placement import DecodeNeed, estimate_all, place_decode, place_whole
from tidemill_router.prefill_placement import Warmth, estimate_prefill, place_prefill
from tidemill_router.turnover import Turnover, pressures

COSTS = Costs()
FACTS = ModelFacts(block_size=32, kv_bytes_per_token=10_000)


def target(name: str, *, age_s: float = 0.1, claims: Claims = Claims(), **load: Any) -> Candidate:  # noqa: B008
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
    assert chosen([target("a", waiting_prefill_tokens=4000), target("b")], 1000, warmth) == "b"


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
    terms = estimate.terms()
    assert terms["total"] == pytest.approx(sum(terms.values()) - terms["total"] - terms["displaced"])


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


def test_blocks_in_another_instances_memory_are_fetched_where_that_is_quicker_than_computing() -> None:
    warmth = Warmth(peer_blocks=20)
    fast = estimate_prefill(target("a", transfer_bytes_per_s=1e9), 1000, FACTS, warmth, COSTS)
    assert (fast.cached_peer_tokens, fast.uncached_tokens) == (640, 360)
    assert fast.fetch_peer_s == pytest.approx(COSTS.peer_latency_s + 640 * 10_000 / 1e9)
    slow = estimate_prefill(target("a", transfer_bytes_per_s=1e6), 1000, FACTS, warmth, COSTS)
    assert (slow.cached_peer_tokens, slow.uncached_tokens, slow.fetch_peer_s) == (0, 1000, 0.0)
    off = estimate_prefill(target("a", transfer_bytes_per_s=1e9), 1000, FACTS, warmth, replace(COSTS, peer_fetch=False))
    assert (off.cached_peer_tokens, off.uncached_tokens) == (0, 1000)


@pytest.mark.parametrize("rate", [30.0, 300.0, 3000.0, 30_000.0])
def test_a_follow_up_stays_with_its_blocks_though_a_peer_could_fetch_them_whatever_the_machine(rate: float) -> None:
    instances = [target(name, prefill_tokens_per_s=rate, transfer_bytes_per_s=1e9) for name in ("a", "b")]
    warmth = {"a": Warmth(TierDepth(l1=9)), "b": Warmth(peer_blocks=9)}
    assert {chosen(instances, 376, warmth, seed) for seed in range(20)} == {"a"}


def test_kvstore_is_not_taken_to_have_what_only_an_instance_has() -> None:
    warmth = Warmth(shared_l3_blocks=5, peer_blocks=20)
    estimate = estimate_prefill(target("a", transfer_bytes_per_s=1e9), 1000, FACTS, warmth, COSTS)
    assert (estimate.cached_peer_tokens, estimate.cached_l3_tokens) == (640, 0)
    costs = replace(COSTS, peer_latency_s=10.0)
    estimate = estimate_prefill(target("a", transfer_bytes_per_s=1e9), 1000, FACTS, warmth, costs)
    assert (estimate.cached_peer_tokens, estimate.cached_l3_tokens, estimate.uncached_tokens) == (0, 160, 840)


def test_an_instance_and_kvstore_send_at_the_same_time() -> None:
    candidate = target("a", transfer_bytes_per_s=2e7)
    both = estimate_prefill(candidate, 1000, FACTS, Warmth(shared_l3_blocks=30, peer_blocks=15), COSTS)
    assert (both.cached_peer_tokens, both.cached_l3_tokens, both.uncached_tokens) == (480, 480, 40)
    slower_s = COSTS.fetch_latency_s + 480 * 10_000 / 2e7
    assert both.fetch_peer_s + both.fetch_l3_s == pytest.approx(slower_s)


def test_a_prefix_that_can_be_fetched_lets_prompts_leave_a_busy_holder() -> None:
    """No cliff: a shorter queue of the holder keeps them there."""
    cold = Warmth(peer_blocks=25)
    for waiting, expected in ((100, "holder"), (1000, "cold")):
        holder = target("holder", waiting_prefill_tokens=waiting, transfer_bytes_per_s=1e8)
        other = target("cold", transfer_bytes_per_s=1e8)
        assert chosen([holder, other], 1000, {"holder": Warmth(TierDepth(l1=25)), "cold": cold}) == expected
    without = {"holder": Warmth(TierDepth(l1=25))}
    assert chosen([target("holder", waiting_prefill_tokens=1000), target("cold")], 1000, without) == "holder"


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
    peer=st.integers(0, 5000),
    age=st.floats(0, 1e6),
    unchanged=st.floats(0),
    rate=st.floats(0, 1e6),
)
def test_predictions_are_finite_and_cover_the_prompt(
    queue: int,
    tokens: int,
    depth: TierDepth,
    pending: int,
    shared: int,
    peer: int,
    age: float,
    unchanged: float,
    rate: float,
) -> None:
    candidate = target("a", age_s=age, waiting_prefill_tokens=queue, prefill_tokens_per_s=rate)
    candidate = replace(candidate, unchanged_s=unchanged)
    estimate = estimate_prefill(candidate, tokens, FACTS, Warmth(depth, pending, shared, peer), COSTS)
    cached = estimate.cached_l1_tokens + estimate.cached_l2_tokens + estimate.cached_l3_tokens
    cached += estimate.cached_peer_tokens
    assert cached + estimate.uncached_tokens == tokens
    assert estimate.uncached_tokens >= 1
    assert all(0.0 <= value < float("inf") for value in estimate.terms().values())
    terms = estimate.terms()
    assert terms["total"] == pytest.approx(sum(terms.values()) - terms["total"] - terms["displaced"])
    without = estimate_prefill(candidate, tokens, FACTS, Warmth(depth, pending, shared), COSTS)
    assert estimate.total_s <= without.total_s * (1 + 1e-9), "one more source can only help"


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
    assert decode([replace(slow, idle_s=600.0), quick]) == "slow"
    slow = target("slow", prefill_tokens_per_s=100.0)
    quick = target("quick", waiting_prefill_tokens=1000)
    assert chosen([slow, quick], 1000, {}) == "quick"
    assert chosen([replace(slow, idle_s=600.0), quick], 1000, {}) == "slow"


def test_held_blocks_save_transfer_time() -> None:
    slow_links = [target("a", transfer_bytes_per_s=2e6), target("b", transfer_bytes_per_s=2e6)]
    assert decode(slow_links, {"b": 31}) == "b"
    [estimate, _] = estimate_all(slow_links, NEED, FACTS, {slow_links[0].key: TierDepth(l1=31)}, COSTS)
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
    [estimate] = estimate_all([candidate], need, FACTS, {candidate.key: TierDepth(l1=held)}, COSTS)
    assert all(0.0 <= value < float("inf") for value in estimate.terms().values())


def test_equal_instances_that_measured_differently_within_the_noise_predict_the_same() -> None:
    cold = [target("a", prefill_tokens_per_s=900.0), target("b", prefill_tokens_per_s=1100.0), target("c")]
    names = Counter(chosen(cold, 1000, {}, seed) for seed in range(300))
    assert min(names.values()) > 60
    slow = [target("a", prefill_tokens_per_s=300.0), target("b"), target("c")]
    assert "a" not in {chosen(slow, 1000, {}, seed) for seed in range(50)}


@given(measured=st.floats(0.1, 1e9), usual=st.floats(0.1, 1e9), step=st.floats(1.0, 1.01))
def test_a_measure_counts_continuously_and_in_order(measured: float, usual: float, step: float) -> None:
    def rate(value: float) -> float:
        return prefill_rate(target("a", prefill_tokens_per_s=value), replace(COSTS, usual_prefill_tokens_per_s=usual))

    lower, higher = rate(measured), rate(min(1e9, measured * step))
    assert min(measured, usual) * 0.999 <= lower <= max(measured, usual) * 1.001
    assert lower <= higher * 1.000001 <= lower * step * 1.00001


def test_what_is_cold_goes_where_the_cache_turned_over_least() -> None:
    fresh, full = target("a"), replace(target("b"), recent_tokens=32_000.0)
    assert {chosen([fresh, full], 1000, {}, seed) for seed in range(50)} == {"a"}
    assert chosen([fresh, full], 1000, {"b": Warmth(TierDepth(l1=25))}) == "b"


@given(inflows=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=20))
def test_pressures_are_about_one_in_the_mean_and_in_order_of_the_inflows(inflows: list[float]) -> None:
    found = pressures(inflows)
    assert sum(found) / len(found) == pytest.approx(1.0)
    assert all(pressure > 0.0 for pressure in found)
    by_inflow = [pressure for _, pressure in sorted(zip(inflows, found, strict=True))]
    assert by_inflow == sorted(by_inflow)


def test_turnover_halves_with_time_and_leaves_with_its_instance() -> None:
    now = [0.0]
    turnover = Turnover(10.0, lambda: now[0])
    turnover.add(("a", 0), 1000)
    now[0] = 10.0
    turnover.add(("a", 0), 500)
    assert turnover.recent_tokens(("a", 0)) == pytest.approx(1000.0)
    turnover.forget("a")
    assert turnover.recent_tokens(("a", 0)) == 0.0


def test_a_follow_up_stays_with_its_blocks_though_a_faster_looking_peer_could_fetch_them() -> None:
    kept = {"a": Warmth(TierDepth(l1=10), shared_l3_blocks=10), "b": Warmth(shared_l3_blocks=10)}
    holder, peer = target("a", prefill_tokens_per_s=850.0), target("b", prefill_tokens_per_s=1150.0)
    tiny = ModelFacts(block_size=32, kv_bytes_per_token=100)
    by_key = {(name, 0): value for name, value in kept.items()}
    for seed in range(50):
        placed = place_prefill([holder, peer], 325, tiny, by_key, COSTS, random.Random(seed))
        assert placed.candidate.key[0] == "a"


def test_instances_with_a_cost_model_are_compared_at_the_same_chunk() -> None:
    cost = StepCost(base_s=0.02, prefill_token_s=0.001)
    short, long = (target(name, prefill_tokens_per_s=rate, step_cost=cost) for name, rate in (("a", 50), ("b", 990)))
    assert prefill_rate(short, COSTS) == prefill_rate(long, COSTS) == pytest.approx(1024 / (0.02 + 1.024))


def test_equal_instances_of_small_steps_share_cold_prompts_though_their_fits_differ() -> None:
    # As measured: all that one learnt is what a step costs, the other saw steps of several sizes.
    fits = {"a": StepCost(base_s=0.0017), "b": StepCost(base_s=0.0017, prefill_token_s=0.000024)}
    claimed = Counter[str]()
    for seed in range(8):
        cold = [
            target(name, step_cost=cost, max_num_batched_tokens=48, claims=Claims(prefill_tokens=claimed[name]))
            for name, cost in fits.items()
        ]
        claimed[chosen(cold, 100, {}, seed)] += 100
    assert set(claimed.values()) == {400}


def test_what_follows_a_slow_l2_is_still_fetched_where_both_together_are_quicker() -> None:
    costs = replace(COSTS, l2_bytes_per_s=9e6)
    estimate = estimate_prefill(
        target("a", transfer_bytes_per_s=1e9), 2000, FACTS, Warmth(TierDepth(l2=2), shared_l3_blocks=60), costs
    )
    assert (estimate.cached_l2_tokens, estimate.cached_l3_tokens) == (64, 1856)


@given(
    queue=st.integers(0, 10**6),
    depth=st.builds(TierDepth, st.integers(0, 200), st.integers(0, 200), st.integers(0, 200)),
    tokens=st.integers(1, 20_000),
    age=st.floats(0.0, 30.0),
    rate=st.floats(10.0, 1e5),
    bandwidth=st.floats(1e5, 1e11),
    recent=st.floats(0.0, 1e6),
)
def test_the_cost_has_no_cliff(
    queue: int, depth: TierDepth, tokens: int, age: float, rate: float, bandwidth: float, recent: float
) -> None:
    costs = replace(COSTS, usual_prefill_tokens_per_s=1000.0)

    def score(scale: float) -> float:
        load = {"prefill_tokens_per_s": rate * scale, "transfer_bytes_per_s": bandwidth * scale}
        candidate = target("a", age_s=age * scale, waiting_prefill_tokens=queue, **load)
        peer = replace(target("b"), recent_tokens=1000.0)
        pressure = pressures([recent * scale / 32_000, peer.recent_tokens / 32_000])[0]
        return estimate_prefill(candidate, tokens, FACTS, Warmth(depth), costs, pressure).score_s

    here, near = score(1.0), score(1.0 + 1e-7)
    assert near == pytest.approx(here, rel=1e-5, abs=1e-5)


def test_a_prompt_whose_first_token_came_is_no_queue_though_the_report_is_older() -> None:
    stale = replace(target("a", waiting_prefill_tokens=900), computed_tokens=900)
    assert estimate_prefill(stale, 100, FACTS, Warmth(), COSTS).queue_s == 0.0
    over = replace(stale, computed_tokens=5000, claims=Claims(prefill_tokens=200))
    assert estimate_prefill(over, 100, FACTS, Warmth(), COSTS).queue_s == pytest.approx(0.2)


def test_computed_prompts_are_kept_for_some_seconds_and_leave_with_their_instance() -> None:
    now = [0.0]
    computed = ComputedPrompts(lambda: now[0])
    computed.add(("a", 0), 100)
    now[0] = 1.0
    computed.add(("a", 0), 30)
    assert computed.tokens_since(("a", 0), -1.0) == 130
    assert computed.tokens_since(("a", 0), 0.5) == 30
    now[0] = 7.0
    computed.add(("a", 0), 5)
    assert computed.tokens_since(("a", 0), float("-inf")) == 5
    computed.forget("a")
    assert computed.tokens_since(("a", 0), float("-inf")) == 0
