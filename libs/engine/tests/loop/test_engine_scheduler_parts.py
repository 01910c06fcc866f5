"""The scheduler's small parts by themselves: queue, timers, ids, in-flight prefixes, load, settings."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_engine.messages import RequestKey, Submit
from tidemill_engine.request import Request, TokenBuffer, make_request
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.scheduler.chunks import chunk_tokens
from tidemill_engine.scheduler.id_pool import IdPool
from tidemill_engine.scheduler.in_flight import InFlightPrefixes
from tidemill_engine.scheduler.load import FreshPercentile
from tidemill_engine.scheduler.timers import Timers
from tidemill_engine.scheduler.waiting import WaitingQueue
from tidemill_engine.settings import EngineSettings, decode_settings, encode_settings
from tidemill_engine.step_cost import MeasuredCost, MovingMean
from tidemill_kvcache.step_cost import StepShape


def make(name: str, *, arrival_s: float = 0.0, priority: int = 0) -> Request:
    submit = Submit(
        key=RequestKey(name),
        stage="whole",
        token_ids=[1],
        prompt_tokens=1,
        sampling=SamplingParams(),
        priority=priority,
    )
    return make_request(submit, arrival_s, 100, priority_aging_s=5.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-3, 3), st.booleans())))
def test_the_queue_keeps_rank_order_whatever_leaves(entries):
    queue, kept = WaitingQueue(), []
    for i, (arrival, priority, leaves) in enumerate(entries):
        request = make(str(i), arrival_s=arrival, priority=priority)
        queue.add(request)
        if leaves:
            queue.remove(request)
        else:
            kept.append(request)
    assert list(queue) == sorted(kept, key=lambda r: r.arrival_s - 5.0 * r.priority)
    assert len(queue) == len(kept)


@given(st.lists(st.integers(0, 1000), max_size=200), st.lists(st.integers(0, 1000), max_size=200))
def test_a_token_buffer_is_a_growing_list(first, more):
    buffer = TokenBuffer(first)
    for token in more:
        buffer.append(token)
    assert buffer.view().tolist() == buffer.to_list() == first + more
    assert buffer.to_list(len(first)) == more
    assert len(buffer) == len(first) + len(more)


def test_timers_fire_once_in_order_and_may_set_new_ones():
    timers, fired = Timers(), []

    def again(subject: Any, now_s: float) -> None:
        fired.append((subject, now_s))
        if subject == "b":
            timers.at(3.0, again, "c")

    timers.at(2.0, again, "a")
    timers.at(1.0, again, "b")
    assert timers.next_due_s == 1.0
    timers.run_due(0.5)
    timers.run_due(2.0)
    assert fired == [("b", 2.0), ("a", 2.0)]
    timers.run_due(9.0)
    assert fired[-1] == ("c", 9.0)
    assert timers.next_due_s == float("inf")


def test_ids_come_smallest_first_and_cannot_come_back_twice():
    ids = IdPool(3)
    assert [ids.take(), ids.take()] == [0, 1]
    ids.give_back(0)
    assert (ids.take(), ids.num_free) == (0, 1)
    with pytest.raises(KeyError):
        ids.give_back(2)


def test_an_in_flight_block_belongs_to_the_first_who_computes_it():
    in_flight = InFlightPrefixes()
    first, second = make("first"), make("second")
    in_flight.register(first, 1, [b"b", b"c"])
    in_flight.register(second, 1, [b"b", b"c", b"d"])
    assert [in_flight.owner(h) for h in (b"a", b"b", b"c", b"d")] == [None, first, first, second]
    in_flight.advance(first, 2)
    assert in_flight.owner(b"b") is None
    in_flight.remove(first)
    in_flight.advance(second, 4)
    assert len(in_flight) == 0


@given(
    start=st.integers(0, 200),
    ahead=st.integers(1, 300),
    budget=st.integers(0, 80),
    interval=st.sampled_from([0, 8, 16]),
)
def test_chunks_cover_a_prompt_and_never_pass_its_deepest_boundary(start, ahead, budget, interval):
    end = start + ahead
    chunk = chunk_tokens(start, end, budget, interval)
    assert 0 <= chunk <= min(budget, ahead)
    assert chunk > 0 or budget == 0
    if interval and chunk:
        deepest = (end - 1) // interval * interval
        assert not start < deepest < start + chunk


def test_a_moving_mean_leaves_out_its_first_samples():
    mean = MovingMean()
    for sample in (100.0, 100.0, 2.0, 4.0):
        mean.add(sample)
    assert mean.value == 3.0


def test_step_costs_separate_prefill_from_decode():
    cost = MeasuredCost()
    for _ in range(6):
        cost.observe(StepShape(decode_rows=4), 0.05)
    for _ in range(6):
        cost.observe(StepShape(prefill_tokens=100, decode_rows=4), 0.25)
    assert cost.decode_step_s == pytest.approx(0.05)
    assert cost.prefill_tokens_per_s == pytest.approx(500.0)
    assert cost.prefill_s(1000) == pytest.approx(2.0)
    assert 0.05 < cost.step_with_decode_s < 0.25


def test_an_unknown_rate_is_zero():
    cost = MeasuredCost()
    cost.observe(StepShape(prefill_tokens=100), 9.0)
    assert (cost.prefill_tokens_per_s, cost.decode_step_s, cost.prefill_s(10)) == (0.0, 0.0, 0.0)


def test_a_percentile_is_upper_and_expires():
    percentile = FreshPercentile(fresh_s=30.0)
    assert percentile.value(0.0) == 0.0
    for i in range(10):
        percentile.add(float(i), float(i))
    assert percentile.value(10.0) == 9.0
    percentile.add(35.0, 1.0)
    assert percentile.value(38.5) == 9.0
    assert percentile.value(60.0) == 1.0
    assert percentile.value(66.0) == 0.0


def test_load_tells_queue_rates_and_predictions(emulated_service: Callable[..., Any]):
    service = emulated_service(num_blocks=400, max_num_seqs=2, max_num_batched_tokens=20)
    service.runner.on_step = lambda: setattr(service, "now_s", service.now_s + 0.1)
    for i in range(6):
        service.submit(f"r{i}", [i] * 60, max_tokens=8)
    for _ in range(12):
        service.step(0.0)
    load = service.engine.scheduler.load_sample()
    assert load.waiting_requests + load.running_requests == 6 - sum(bool(service.finish(k)) for k in service.outputs)
    assert load.waiting_prefill_tokens > 0
    assert load.prefill_tokens_per_s == pytest.approx(200, rel=0.2)
    assert load.predicted_ttft_s >= load.waiting_prefill_tokens / load.prefill_tokens_per_s
    assert 0 < load.measured_ttft_s < 1.3
    service.run()
    load = service.engine.scheduler.load_sample()
    assert load.measured_tpot_s == pytest.approx(0.1, rel=0.2)
    assert (load.output_tokens_total, load.prompt_tokens_total) == (48, 360)


def test_an_engine_that_has_become_idle_predicts_nothing_of_the_batch_that_has_ended(
    emulated_service: Callable[..., Any],
):
    service = emulated_service(num_blocks=400, max_num_seqs=16)

    def rows_take_time() -> None:
        rows = sum(request.is_decoding for request in service.engine.scheduler.state.running)
        service.now_s += 0.01 * (1 + rows)

    service.runner.on_step = rows_take_time
    for i in range(24):
        # Their ends spread, so that steps of several sizes teach what a row costs.
        service.submit(f"r{i}", [i] * 20, max_tokens=20 + 4 * i)
    most, lengths = 0.0, []
    while not all(service.finish(key) for key in service.outputs) or len(service.outputs) < 24:
        service.step(0.0)
        load = service.engine.scheduler.load_sample()
        most, lengths = max(most, load.predicted_tpot_s), [*lengths, load.context_tokens]
    assert most > 0.1
    assert load.predicted_tpot_s < 0.05
    assert max(lengths) > 16 * 20
    assert (load.running_requests, load.context_tokens) == (0, 0)
    service.now_s += 60
    assert service.engine.scheduler.load_sample().measured_ttft_s == 0.0


def test_settings_survive_their_json_form():
    settings = EngineSettings(model_dir="/models/a", tp_size=2, rank=1, tp_init_method="tcp://x:1", step_socket="/s")
    assert decode_settings(encode_settings(settings)) == settings


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"block_size": 0}, "block_size"),
        ({"rank": 1}, "rank"),
        ({"tp_size": 2}, "tp_init_method"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"kv_memory_bytes": 0}, "kv_memory_bytes"),
    ],
)
def test_wrong_settings_are_refused_by_name(options, name):
    with pytest.raises(ValueError, match=name):
        decode_settings(encode_settings(EngineSettings(model_dir="m", **options)))
