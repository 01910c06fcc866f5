"""The simulated fleet: exact where it can be, deterministic, and ending with nothing held."""

import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from tidemill_bench.simulation.capacity import Targets, highest_speed
from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_bench.simulation.engine import EngineShape
from tidemill_bench.simulation.index_feed import BusFaults
from tidemill_bench.simulation.one_pool import hit_blocks
from tidemill_bench.simulation.outcome import Outcome
from tidemill_bench.simulation.placement import DynamoFormula
from tidemill_bench.simulation.replay import (
    Fleet,
    FleetShape,
    dynamo_formula,
    load_only,
    replay,
    replay_within,
    round_robin,
    run_fleet,
    tidemill,
)
from tidemill_bench.simulation.tiers import LowerTiers, TierShape, host_blocks, store_blocks
from tidemill_bench.simulation.timing import EngineTiming
from tidemill_bench.simulation.trace import TraceRequest
from tidemill_kvcache.index import L1

BLOCK = 64
ENGINE = EngineShape(num_blocks=300, block_size=BLOCK, max_num_batched_tokens=2048)
SHAPE = FleetShape(num_engines=4, engine=ENGINE)


def conversations(sessions: int, seed: int = 0) -> list[TraceRequest]:
    """Sessions of some turns, each turn a longer prompt; all start with block 0, as Mooncake's conversations do."""
    rng = random.Random(seed)
    planned, next_id = [], 1
    for _ in range(sessions):
        when, ids = rng.uniform(0.0, 60.0), [0]
        for _ in range(rng.choice((1, 1, 2, 4))):
            more = rng.randrange(2, 30)
            ids = [*ids, *range(next_id, next_id + more)]
            next_id += more
            planned.append((when, list(ids), rng.randrange(1, BLOCK + 1)))
            when += rng.uniform(5.0, 30.0)
    planned.sort(key=lambda item: item[0])
    return [
        TraceRequest(i, when, (len(ids) - 1) * BLOCK + tail, rng.randrange(1, 120), ids)
        for i, (when, ids, tail) in enumerate(planned)
    ]


REQUESTS = conversations(70)
HASHES = [request.prompt_hashes(BLOCK) for request in REQUESTS]


def leaf_first_lru(requests: list[TraceRequest], capacity: int) -> list[int]:
    """Hit blocks by request of one pool, written without the product's code."""
    blocks: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        hit = 0
        while hit < len(request.block_ids) and request.block_ids[hit] in blocks:
            hit += 1
        hits.append(hit)
        for block in reversed(request.block_ids[:capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > capacity:
            blocks.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [100, 400, 10_000])
def test_one_pool_hits_as_an_independent_lru_does_line_by_line(capacity: int) -> None:
    assert hit_blocks(REQUESTS, capacity) == leaf_first_lru(REQUESTS, capacity)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    request = TraceRequest(0, 1.0, 3000, 10, list(range(47)))
    outcome = replay([request], [request.prompt_hashes(BLOCK)], SHAPE, round_robin)
    timing = EngineTiming()
    assert outcome.ttft_s[0] == pytest.approx(timing.prefill_s(2048) + timing.prefill_s(952))
    assert outcome.tpot_s[0] == pytest.approx(timing.decode_s(47 / 300), rel=0.02)
    assert outcome.hit_rate == 0.0


def test_a_second_turn_computes_only_what_is_new() -> None:
    first = TraceRequest(0, 0.0, 640, 5, list(range(10)))
    second = TraceRequest(1, 5.0, 1000, 5, list(range(16)))
    shape = replace(SHAPE, num_engines=1)
    outcome = replay([first, second], [r.prompt_hashes(BLOCK) for r in (first, second)], shape, round_robin)
    assert outcome.cached_l1.tolist() == [0.0, 640.0]
    assert outcome.ttft_s[1] == pytest.approx(EngineTiming().prefill_s(360))


@pytest.mark.parametrize("placement", [round_robin, load_only, dynamo_formula, tidemill])
def test_every_request_ends_and_nothing_stays_held(placement: object) -> None:
    fleet = run_fleet(REQUESTS, HASHES, SHAPE, placement)  # type: ignore[arg-type]
    assert sorted(job.request.index for job, _, _ in fleet.ended) == list(range(len(REQUESTS)))
    for engine in fleet.engines:
        engine.cache.check_invariants()
        assert engine.cache.used_blocks == 0
        assert not engine.waiting
        assert not engine.running
    if isinstance(fleet.placement, DynamoFormula):
        assert fleet.placement.is_idle


def test_preempted_requests_end_too() -> None:
    tight = replace(SHAPE, num_engines=1, engine=replace(ENGINE, num_blocks=60))
    requests = [TraceRequest(i, 0.0, 600, 400, range(100 * i, 100 * i + 10)) for i in range(8)]
    outcome = replay(requests, [r.prompt_hashes(BLOCK) for r in requests], tight, round_robin)
    assert len(outcome.ttft_s) == 8


def test_a_replay_is_deterministic() -> None:
    one, other = (replay(REQUESTS, HASHES, SHAPE, tidemill) for _ in range(2))
    assert np.array_equal(one.ttft_s, other.ttft_s)
    assert np.array_equal(one.engine, other.engine)


def test_the_router_keeps_prefixes_together_and_does_not_follow_the_shared_first_block() -> None:
    ours, turns = replay(REQUESTS, HASHES, SHAPE, tidemill), replay(REQUESTS, HASHES, SHAPE, round_robin)
    assert ours.hit_rate > turns.hit_rate + 0.1
    assert ours.mean_ttft_ms < turns.mean_ttft_ms
    assert ours.imbalance < 1.3


@pytest.mark.parametrize("faults", [BusFaults(delay_s=0.5), BusFaults(loss=0.2), BusFaults(delay_s=0.1, loss=0.05)])
def test_the_index_equals_the_caches_after_a_late_and_lossy_bus_is_quiet(faults: BusFaults) -> None:
    fleet = run_fleet(REQUESTS, HASHES, replace(SHAPE, faults=faults), tidemill)
    fleet.feed.heal()
    end = fleet.clock.now_s + 10.0
    fleet.clock.at(end, lambda: None)
    fleet.clock.run(lambda: fleet.clock.now_s >= end)
    for source in fleet.sources:
        held = {h for run in source.mirror.runs() for h in _hashes(run.block_hashes)}
        assert fleet.feed.index.hashes_of((source.domain.instance, 0), L1) == held


def _hashes(packed: bytes) -> list[bytes]:
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def test_lower_tiers_give_what_the_pool_had_to_drop() -> None:
    small = replace(SHAPE, engine=replace(ENGINE, num_blocks=130))
    l1_only = replay(REQUESTS, HASHES, small, tidemill)
    tiers = TierShape(l2_blocks=100, l3_blocks=10_000, l3_latency_s=0.0, l2_bytes_per_s=1e12, l3_bytes_per_s=1e12)
    fleet_shape = replace(small, tiers=tiers)
    all_tiers = replay(REQUESTS, HASHES, fleet_shape, tidemill)
    unlimited = sum(leaf_first_lru(REQUESTS, 10**9)) * BLOCK / sum(r.input_tokens for r in REQUESTS)
    assert all_tiers.tier_rate(2) > 0.0
    assert all_tiers.tier_rate(3) > 0.0
    assert l1_only.hit_rate < all_tiers.hit_rate <= unlimited
    assert all_tiers.hit_rate > 0.9 * unlimited


def test_a_slow_store_is_not_asked() -> None:
    slow = TierShape(l2_blocks=100, l3_blocks=10_000, l2_bytes_per_s=1e3, l3_bytes_per_s=1e3)
    shape = replace(SHAPE, engine=replace(ENGINE, num_blocks=130), tiers=slow)
    outcome = replay(REQUESTS, HASHES, shape, tidemill)
    assert outcome.tier_rate(2) == outcome.tier_rate(3) == 0.0


@pytest.mark.parametrize("limit", [0.3, 1.7, 5.3, 40.0])
@pytest.mark.parametrize("step", [1.3, 2.0])
def test_the_highest_speed_lies_within_its_tolerance_below_the_limit(limit: float, step: float) -> None:
    zeros = np.zeros(100)
    outcome = Outcome(zeros, zeros + 1, zeros, zeros, zeros, zeros, zeros, np.zeros(100, np.int64), zeros + 1)
    speed, _ = highest_speed(lambda tried: outcome if tried <= limit else None, step=step)
    assert limit / 1.1 <= speed <= limit


def test_targets_that_cannot_be_kept_are_an_error() -> None:
    with pytest.raises(ValueError, match="not kept"):
        highest_speed(lambda speed: None)


def test_a_replay_within_targets_judges_as_its_outcome_does() -> None:
    """It stops early where too many miss, and leaves out what fills the caches."""
    some = REQUESTS[:60]
    whole = replay(some, HASHES, SHAPE, tidemill, speed=3.0).after(20)
    for ttft_s in (0.1, float(np.quantile(whole.ttft_s, 0.97))):
        targets = Targets(ttft_s=ttft_s, tpot_s=10.0, warm_up_requests=20)
        within = replay_within(some, HASHES, SHAPE, tidemill, targets, speed=3.0)
        assert (within is not None) == (whole.attainment(ttft_s, 10.0) >= targets.share)
        if within is not None:
            assert np.array_equal(within.ttft_s, whole.ttft_s)


def test_two_stages_end_with_nothing_held_and_their_decode_steps_meet_no_prompt() -> None:
    tiers = TierShape(l2_blocks=200, l3_blocks=10_000, peer_fetch=True)
    shape = replace(SHAPE, prefill_engines=2, tiers=tiers)
    fleet = run_fleet(REQUESTS[:60], HASHES, shape, tidemill, speed=4.0)
    assert len(fleet.ended) == 60
    for engine in fleet.engines:
        engine.cache.check_invariants()
        assert engine.cache.used_blocks == 0
    assert {number for job, number, _ in fleet.ended if job.cached_l1 == 0} == {0, 1}
    for job, _, ended_s in fleet.ended:
        steps = job.request.output_tokens - 1
        if steps > 20:
            assert (ended_s - job.first_token_s) / steps < EngineTiming().decode_s(1.0) * 1.5


def test_what_another_engine_has_comes_at_the_same_time_as_what_the_store_has() -> None:
    tiers = TierShape(l2_blocks=4, l3_blocks=90, peer_bytes_per_s=100.0, l3_bytes_per_s=50.0, peer_latency_s=1.0)
    host, store = host_blocks(tiers, lambda events: None), store_blocks(tiers, lambda events: None)
    hashes = REQUESTS[0].prompt_hashes(BLOCK)[:9]
    parents = dict(zip(hashes, [b"", *hashes], strict=False))
    host.put(hashes[:2], parents)
    store.put(hashes[:8], parents)
    lower = LowerTiers(SimulatedClock(), tiers, 100, host, store)
    fetch = lower.fetch(hashes, compute_block_s=60.0, at_peer=5)
    assert (fetch.l2_blocks, fetch.peer_blocks, fetch.l3_blocks) == (2, 3, 3)
    assert fetch.seconds == pytest.approx(tiers.l3_latency_s + 3 * 100 / 50.0)
    assert lower.fetch(hashes, compute_block_s=1.1, at_peer=5).peer_blocks == 0


def test_a_fleet_starts_without_work() -> None:
    fleet = Fleet(SHAPE)
    assert all(engine.prefill_tokens_ahead == 0 for engine in fleet.engines)
