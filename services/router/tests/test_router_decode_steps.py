"""Decode placement goes by what a batch will cost, whatever the targets measured of batches that have ended."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_engine.step_cost import MeasuredCost
from tidemill_kvcache.step_cost import StepCost, StepShape
from tidemill_kvcache.step_cost_message import to_message
from tidemill_router.candidate import Candidate, Claims, Costs, ModelFacts
from tidemill_router.decode_placement import DecodeNeed, estimate_all, place_decode
from tidemill_router.report_times import ReportTimes

COSTS = Costs()
FACTS = ModelFacts(block_size=32, kv_bytes_per_token=10_000)
NEED = DecodeNeed(context_tokens=320, max_tokens=64)
TRUE = StepCost(base_s=0.01, prefill_token_s=1e-4, decode_row_s=0.005, decode_context_s=1e-6)
ROWS = 320


def target(name: str, cost: StepCost | None = TRUE, *, rows: int = 0, idle_s: float = 0.0, **load: Any) -> Candidate:
    values = {
        "total_blocks": 10_000,
        "available_blocks": 10_000,
        "running_requests": rows,
        "context_tokens": rows * ROWS,
    }
    report = LoadReport(**{**values, **load})
    if cost is not None:
        report.step_cost.CopyFrom(to_message(cost))
    return Candidate((name, 0), DomainRef(instance=name), f"{name}:1", 10_000, report, 0.1, idle_s=idle_s)


def placed(targets: list[Candidate], num_requests: int, seed: int = 0) -> Counter[str]:
    """How many requests each gets before any of them reports again."""
    by_key = {candidate.key: candidate for candidate in targets}
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(num_requests):
        chosen = place_decode(list(by_key.values()), NEED, FACTS, {}, COSTS, rng).candidate
        claims = Claims(0, chosen.claims.sequences + 1, chosen.claims.blocks + NEED.blocks(FACTS, COSTS))
        by_key[chosen.key] = replace(chosen, claims=claims)
        counts[chosen.key[0]] += 1
    return counts


def learnt(steps: list[int], seed: int) -> MeasuredCost:
    """What an engine of the true cost knows after decode steps of so many rows."""
    rng, cost = random.Random(seed), MeasuredCost()
    for rows in steps:
        shape = StepShape(decode_rows=rows, decode_context=rows * ROWS)
        cost.observe(shape, TRUE.step_s(shape) * rng.lognormvariate(0.0, 0.05))
    return cost


def test_an_idle_survivor_of_an_overload_is_chosen_at_once_and_not_the_one_that_was_restarted() -> None:
    """Its measures are of a full batch, and nothing refreshes them while it gets nothing."""
    overloaded, fresh = learnt([*range(1, 17), *[16] * 200], 1), learnt([1] * 4 + [2] * 8, 2)
    assert overloaded.decode_step_s > 4 * fresh.decode_step_s
    survivor = target("survivor", overloaded.model, decode_step_s=overloaded.decode_step_s, measured_tpot_s=0.5)
    restarted = target("restarted", fresh.model, decode_step_s=fresh.decode_step_s, rows=6)
    assert placed([survivor, restarted], 6, 0)["survivor"] == 6
    assert placed([survivor, restarted], 30, 0)["survivor"] >= 15


def test_a_steady_stream_is_shared_though_one_was_overloaded_before() -> None:
    """Each request lives for 16 arrivals; reports are always fresh, but only work could change what they measured."""
    costs = {"survivor": learnt([*range(1, 17), *[16] * 200], 1), "restarted": learnt([1] * 4 + [2] * 8, 2)}
    alive: dict[str, list[int]] = {name: [] for name in costs}
    shares, rng = Counter[str](), random.Random(0)
    for arrival in range(100):
        alive = {name: [since for since in lives if arrival - since < 16] for name, lives in alive.items()}
        targets = [
            target(name, cost.model, rows=len(alive[name]), decode_step_s=cost.decode_step_s)
            for name, cost in costs.items()
        ]
        chosen = place_decode(targets, NEED, FACTS, {}, COSTS, rng).candidate.key[0]
        alive[chosen].append(arrival)
        shares[chosen] += 1
    assert abs(shares["survivor"] - shares["restarted"]) <= 10


@given(
    measures=st.tuples(*[st.floats(0.0, 700.0)] * 2),
    idle=st.tuples(*[st.floats(0.0, 1e4)] * 2),
    rows=st.integers(0, 64),
    seats=st.sampled_from([0, 8, 64]),
    base_s=st.floats(0.0, 1.0),
    row_s=st.floats(0.0, 1.0),
    num_requests=st.integers(1, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_equal_costs_and_equal_batches_split_evenly_whatever_was_measured_before(
    measures: tuple[float, float],
    idle: tuple[float, float],
    rows: int,
    seats: int,
    base_s: float,
    row_s: float,
    num_requests: int,
    seed: int,
) -> None:
    cost = StepCost(base_s=base_s + 1e-4, decode_row_s=row_s)
    pair = [
        target(
            name,
            cost,
            rows=rows,
            idle_s=since_s,
            decode_step_s=measured,
            measured_tpot_s=measured,
            max_num_seqs=seats,
        )
        for name, measured, since_s in zip("ab", measures, idle, strict=True)
    ]
    counts = placed(pair, num_requests, seed)
    assert abs(counts["a"] - counts["b"]) <= 1


@given(pasts=st.tuples(*[st.lists(st.integers(1, 32), min_size=8, max_size=60)] * 2), rows=st.integers(0, 16))
@settings(max_examples=30)
def test_equal_engines_that_learnt_from_different_batches_split_within_a_bound(
    pasts: tuple[list[int], list[int]], rows: int
) -> None:
    """Their models differ by what they have seen; the larger batch costs more by each of them."""
    costs = [learnt(past, seed) for seed, past in enumerate(pasts)]
    pair = [
        target(name, cost.model, rows=rows, decode_step_s=cost.decode_step_s)
        for name, cost in zip("ab", costs, strict=True)
    ]
    counts = placed(pair, 40)
    assert min(counts["a"], counts["b"]) >= 10, [cost.model for cost in costs]


def test_a_target_that_is_really_slower_gets_less() -> None:
    counts = placed([target("slow", TRUE.times(4.0)), target("quick")], 30)
    assert counts["slow"] < 10


def test_longer_contexts_count() -> None:
    cost = StepCost(base_s=0.01, decode_row_s=0.0, decode_context_s=1e-5)
    counts = placed(
        [target("long", cost, context_tokens=100_000, running_requests=1), target("short", cost, rows=1)], 20
    )
    assert counts["long"] == 0


def test_beyond_its_seats_a_batch_takes_turns() -> None:
    full, other = target("full", rows=8, max_num_seqs=8), target("other", rows=8, max_num_seqs=16)
    estimates = estimate_all([full, other], NEED, FACTS, {}, COSTS)
    assert [estimate.has_seat for estimate in estimates] == [False, True]
    assert estimates[0].tpot_s > estimates[1].tpot_s


def test_a_target_without_a_model_is_taken_to_be_like_its_peers_for_the_batch_that_it_has() -> None:
    estimates = estimate_all([target("new", None), target("full", rows=16)], NEED, FACTS, {}, COSTS)
    assert estimates[0].tpot_s == pytest.approx(TRUE.decode_step_s(1, NEED.context_tokens))
    assert estimates[1].tpot_s == pytest.approx(TRUE.decode_step_s(17, 16 * ROWS + NEED.context_tokens))


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_model_that_predicts_nonsense_is_none(nonsense: float) -> None:
    estimates = estimate_all([target("odd", StepCost(base_s=nonsense)), target("sane")], NEED, FACTS, {}, COSTS)
    assert estimates[0].tpot_s == pytest.approx(estimates[1].tpot_s)


def test_a_release_that_reports_no_model_is_judged_by_its_measured_step() -> None:
    quick, slow = target("quick", None, decode_step_s=0.02), target("slow", None, decode_step_s=0.2)
    assert placed([quick, slow], 5) == {"quick": 5}


def test_what_an_idle_target_has_learnt_ages_though_its_percentiles_expire_and_work_makes_it_new() -> None:
    now_s = 100.0
    times = ReportTimes(lambda: now_s)

    def reported(at_s: float, **load: Any) -> float:
        nonlocal now_s
        now_s = at_s
        times.on_report(LoadReport(domain=DomainRef(instance="d", epoch="e"), **load))
        return now_s - times.worked_at(("d", 0))

    assert reported(100.0, output_tokens_total=5, running_requests=1, measured_tpot_s=0.5) == 0.0
    assert reported(110.0, output_tokens_total=5, running_requests=1, measured_tpot_s=0.4) == 0.0
    assert reported(111.0, output_tokens_total=9, measured_tpot_s=0.4) == 0.0
    assert reported(121.0, output_tokens_total=9, measured_tpot_s=0.3) == 10.0
    assert reported(141.0, output_tokens_total=9) == 30.0
    assert now_s - times.changed_at(("d", 0)) == 0.0
    assert reported(142.0, output_tokens_total=10) == 0.0
