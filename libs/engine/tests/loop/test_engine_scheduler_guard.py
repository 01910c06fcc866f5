"""Growth of KV in decode: forecast, high-water mark, runaways, targets, and the one that outgrows the pool."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill_engine.messages import RequestKey, RunawayFound
from tidemill_engine.scheduler.decode_guard import repeats_with
from tidemill_engine.scheduler.output_lengths import OutputLengths
from tidemill_engine.step import SchedulerOutput, StepResult


def looping(service: Any, *names: str) -> Any:
    """Lets these requests emit one token for ever; the emulated model says something else each time."""
    execute, rows = service.runner.execute, {}

    def run(out: SchedulerOutput) -> StepResult:
        result: StepResult = execute(out)
        rows.update({request.row: request.key.request_id for request in service.engine.scheduler.state.running})
        for sampled in result.sampled:
            if rows[sampled.row] in names:
                sampled.token_ids[-1] = 7
                service.runner.rows[sampled.row].token_ids[-1] = 7
        return result

    service.runner.execute = run
    return service


def notices(service: Any) -> list[RunawayFound]:
    return [n for n in service.engine.scheduler.state.notices if isinstance(n, RunawayFound)]


def load(service: Any) -> Any:
    return service.engine.scheduler.load_sample()


def test_a_request_that_outgrows_the_pool_ends_with_the_numbers(emulated_service, emulated_continuation):
    service = emulated_service(num_blocks=10)
    key = service.submit("a", list(range(20)), max_tokens=500)
    service.run()
    error = service.outputs[key][-1].error
    assert (error.code, error.field, error.limit) == ("RESOURCE_EXHAUSTED", "sampling.max_tokens", "40 tokens")
    assert "need 11 blocks, the pool has 10" in error.message
    assert service.tokens(key) == emulated_continuation(list(range(20)), 21)
    service.assert_nothing_held()


def test_two_that_together_outgrow_the_pool_both_end(emulated_service):
    service = emulated_service(num_blocks=20, admission_headroom_tokens=1)
    keys = [service.submit(f"r{i}", [i] * 8, max_tokens=500) for i in range(2)]
    service.run()
    assert [service.outputs[key][-1].error.code for key in keys] == ["RESOURCE_EXHAUSTED"] * 2
    service.assert_nothing_held()


def test_a_prompt_larger_than_the_pool_is_refused_at_once(emulated_service):
    service = emulated_service(num_blocks=4)
    key = service.submit("a", list(range(17)), max_tokens=1)
    service.run()
    assert service.outputs[key][-1].error.code == "CONTEXT_TOO_LONG"


def test_past_the_mark_it_says_so_and_still_admits_what_fits(emulated_service):
    service = emulated_service(num_blocks=40, kv_high_water=0.5, admission_headroom_tokens=1)
    first = service.submit("first", list(range(60)), max_tokens=40)
    for _ in range(24):
        service.step()
    assert load(service).used_blocks >= 20
    late = service.submit("late", [7] * 3, max_tokens=2)
    service.step()
    assert load(service).admission_paused
    assert load(service).waiting_requests == 0
    service.run()
    assert (service.finish(first), service.finish(late)) == ("length", "length")
    assert not load(service).admission_paused


def test_once_growth_has_taken_blocks_from_somebody_admission_pauses_until_there_is_room(
    emulated_service, emulated_continuation
):
    service = emulated_service(num_blocks=60, admission_headroom_tokens=1)
    prompts = {service.submit(f"r{i}", [i] * 8, max_tokens=60): [i] * 8 for i in range(8)}
    while not load(service).preemptions_total:
        service.step()
    late = service.submit("late", [7] * 3, max_tokens=2)
    steps = 0
    while service.engine.cache.used_blocks >= 0.85 * 60:
        assert late not in service.outputs
        service.step()
        assert service.engine.scheduler.state.admission_paused
        steps += 1
    assert steps > 1
    service.run()
    for key, prompt in prompts.items():
        assert service.tokens(key) == emulated_continuation(prompt, 60)
    assert service.finish(late) == "length"
    assert not service.engine.scheduler.state.admission_paused
    service.assert_nothing_held()


def test_a_prompt_whose_kv_goes_elsewhere_is_not_paused(emulated_service):
    service = emulated_service(num_blocks=40, kv_high_water=0.3, admission_headroom_tokens=1)
    service.submit("grows", list(range(60)), max_tokens=90)
    for _ in range(5):
        service.step()
    prefill = service.submit("prefill", [7] * 9, max_tokens=2, stage="prefill")
    service.step()
    assert load(service).admission_paused
    assert service.finish(prefill) == "prefilled"


def test_growth_to_expect_keeps_a_newcomer_out_that_would_fit_now(emulated_service):
    def preemptions(forecast: bool) -> int:
        service = emulated_service(
            num_blocks=64, max_num_seqs=8, forecast_growth=forecast, kv_high_water=1.0, admission_headroom_tokens=4
        )
        for index in range(24):
            service.submit(f"past{index}", [index] * 5, max_tokens=60)
            if index % 4 == 3:
                service.run()
        before = load(service).preemptions_total
        keys = [service.submit(f"r{i}", [100 + i] * 6, max_tokens=60) for i in range(8)]
        service.run()
        assert all(service.finish(key) == "length" for key in keys)
        service.assert_nothing_held()
        return load(service).preemptions_total - before

    assert preemptions(True) == 0 < preemptions(False)


def test_a_loop_is_found_and_gives_way_without_a_change_in_anybodys_tokens(emulated_service, emulated_continuation):
    service = looping(
        emulated_service(num_blocks=160, kv_high_water=0.5, runaway_wait_s=2.0, admission_headroom_tokens=4), "loop"
    )
    loop = service.submit("loop", [1] * 8, max_tokens=500)
    for _ in range(330):
        service.step()
    assert load(service).runaways_total == 1
    others = [service.submit(f"r{i}", [10 + i] * 80, max_tokens=30) for i in range(6)]
    service.run()
    assert service.engine.scheduler.load_sample().preemptions_total == 1
    assert service.tokens(loop) == [7] * 500
    assert service.finish(loop) == "length"
    for index, key in enumerate(others):
        assert service.tokens(key) == emulated_continuation([10 + index] * 80, 30)
    done = [o.key for report in service.reports for o in report.outputs if o.finish]
    assert done[-1] == loop
    service.assert_nothing_held()


def beside_a_runaway(service: Any, *, beside_tokens: int) -> Any:
    """A runaway of 85 blocks, a request of 70 that ends after so many tokens, and one of 40 that finds no room."""
    looping(service, "loop").submit("loop", [1] * 8, max_tokens=600)
    for _ in range(330):
        service.step()
    assert load(service).runaways_total == 1
    service.submit("beside", [3] * 280, max_tokens=beside_tokens)
    while len(service.engine.scheduler.state.waiting) or not service.outputs.get(RequestKey("beside")):
        service.step()
    return service.submit("head", [5] * 160, max_tokens=3)


@pytest.mark.parametrize(("beside_tokens", "preemptions"), [(8, 0), (60, 1)])
def test_a_runaway_stays_while_its_recompute_would_cost_all_more_than_those_who_wait_would_win(
    emulated_service, beside_tokens, preemptions
):
    """No cost is known here: some 340 tokens are taken to be eleven steps of 0.1 s, as an output token is. Two run and
    one waits, so waiting is worth three times that."""
    service = emulated_service(num_blocks=176, kv_high_water=0.5, admission_headroom_tokens=4)
    head = beside_a_runaway(service, beside_tokens=beside_tokens)
    while not service.finish(head):
        service.step()
    assert load(service).preemptions_total == preemptions
    assert (service.finish(RequestKey("beside")) is None) == bool(preemptions)
    service.run()
    assert service.tokens(RequestKey("loop")) == [7] * 600
    service.assert_nothing_held()


def test_a_wrong_prediction_of_room_costs_no_more_than_that_time(emulated_service):
    service = emulated_service(num_blocks=176, kv_high_water=0.5, admission_headroom_tokens=4)
    for _ in range(20):
        service.engine.scheduler.state.lengths.add(("", 0), 3)
    head = beside_a_runaway(service, beside_tokens=400)
    begun_s = service.now_s
    while not load(service).preemptions_total:
        service.step(0.3)
    recompute_s = service.engine.scheduler.state.recompute_s(
        service.engine.scheduler.state.requests[RequestKey("loop")]
    )
    assert 3 * recompute_s <= service.now_s - begun_s + 0.1 <= 3 * recompute_s + 3 * 0.3
    while not service.finish(head):
        service.step()
    service.run()
    service.assert_nothing_held()


def test_an_output_far_longer_than_its_class_is_a_runaway_and_others_are_not(emulated_service):
    service = emulated_service(num_blocks=400, max_num_seqs=8)
    for index in range(24):
        service.submit(f"past{index}", [index] * 5, max_tokens=20, tenant="a")
    service.run()
    service.submit("long", [50] * 5, max_tokens=200, tenant="a")
    service.submit("usual", [51] * 5, max_tokens=70, tenant="a")
    service.run()
    assert load(service).runaways_total == 1


def test_targets_bound_the_batch_but_one_is_always_served(emulated_service):
    def most_rows(load_limit: float) -> int:
        service = emulated_service(num_blocks=400, max_num_seqs=8, most_tpot_load=load_limit)
        execute = service.runner.execute

        def timed(out: SchedulerOutput) -> StepResult:
            service.now_s += 0.02 * len(out.rows) + 0.001 * sum(row.num_tokens for row in out.rows)
            result: StepResult = execute(out)
            return result

        service.runner.execute = timed
        keys = [
            service.submit(f"r{i}", [i, i // 7] * (2 + i % 5), max_tokens=6 + i % 9, slo_tpot_s=0.1) for i in range(60)
        ]
        while service.step(0.0):
            pass
        assert all(service.finish(key) == "length" for key in keys)
        return max(len(step.rows) for step in service.runner.steps[-40:])

    assert most_rows(0.0) == 8
    assert 1 <= most_rows(1.0) <= 6
    assert most_rows(0.01) >= 1


@given(period=st.integers(1, 64), tail=st.integers(256, 400), seed=st.integers(0, 99))
def test_a_repeat_is_found_with_its_shortest_period(period, tail, seed):
    unit = np.random.default_rng(seed).permutation(1000)[:period].astype(np.uint32)
    output = np.concatenate([np.arange(5000, 5100, dtype=np.uint32), np.resize(unit, tail)])
    assert repeats_with(output) == period
    assert repeats_with(np.append(output, np.uint32(9999))) == 0
    assert repeats_with(np.arange(1000, dtype=np.uint32)) == 0


@given(lengths=st.lists(st.integers(1, 1000), min_size=20, max_size=60), emitted=st.integers(0, 1200))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_left_is_the_mean_of_those_that_got_further(lengths, emitted):
    known = OutputLengths()
    assert known.expected_left("a", emitted) is None
    for length in lengths:
        known.add("b", length)
    longer = [length for length in lengths if length > emitted]
    expected = sum(longer) / len(longer) - emitted if longer else max(1, emitted)
    assert known.expected_left("a", emitted) == pytest.approx(expected)


def test_classes_are_bounded_and_the_oldest_goes():
    known = OutputLengths()
    for name in range(100):
        for _ in range(20):
            known.add(name, name + 1)
    assert known.upper(99, 0.5) == 100
    assert known.upper(0, 0.5) != 1


def test_a_key_is_reported_with_what_it_did(emulated_service):
    service = looping(emulated_service(num_blocks=160), "loop")
    key = service.submit("loop", [1] * 8, max_tokens=400)
    found: list[RunawayFound] = []
    while service.engine.scheduler.state.requests.get(key) is not None or not service.outputs:
        out = service.engine.scheduler.schedule()
        service.engine.scheduler.commit(service.runner.execute(out))
        found += notices(service)
        service.engine.scheduler.take_notices()
        service.engine.scheduler.take_outputs()
        if not service.engine.scheduler.state.requests:
            break
    assert [(notice.key, notice.output_tokens) for notice in found] == [(RequestKey("loop"), 256)]


def test_while_tokens_are_late_prompts_get_smaller_chunks_until_they_are_not(emulated_service, emulated_continuation):
    service = emulated_service(num_blocks=600, small_chunk_load=2.0)
    late = service.submit("late", list(range(8)), max_tokens=1200, slo_tpot_s=0.1)
    for _ in range(20):
        service.step(0.25)
    assert load(service).degraded == ["small_chunks"]
    service.submit("prompt", list(range(100)), max_tokens=1)
    service.step(0.25)
    assert [row.num_tokens for row in service.runner.steps[-1].rows] == [1, 8]
    while load(service).degraded:
        assert not service.finish(late), "it never went off"
        service.step(0.05)
    second = service.submit("second", [7] * 100, max_tokens=1)
    service.step(0.05)
    assert [row.num_tokens for row in service.runner.steps[-1].rows] == [1, 31]
    service.run()
    assert service.finish(second) == "length"
    assert service.tokens(late) == emulated_continuation(list(range(8)), 1200)
    service.assert_nothing_held()


def test_an_engine_that_has_become_idle_is_degraded_no_more(emulated_service):
    service = emulated_service(num_blocks=600, small_chunk_load=2.0)
    service.submit("late", list(range(8)), max_tokens=20, slo_tpot_s=0.1)
    for _ in range(18):
        service.step(0.25)
    assert load(service).degraded == ["small_chunks"]
    service.run()
    for _ in range(7):
        service.now_s += 1.0
        service._sort(service.engine.tick())
    assert service.reports[-1].load.degraded == []
