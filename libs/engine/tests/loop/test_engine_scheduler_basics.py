"""Batching, chunks, prefix hits, ends and refusals, over the emulated runner."""

import pytest

from tidemill_engine.messages import Abort, AddCredit, RequestKey, ResetCache
from tidemill_engine.scheduler.chunks import chunk_tokens


def test_a_request_runs_to_its_length_with_the_models_tokens(emulated_service, emulated_continuation):
    service = emulated_service()
    prompt = list(range(10))
    key = service.submit("a", prompt, max_tokens=7)
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 7)
    assert service.finish(key) == "length"
    first = service.outputs[key][0]
    assert (first.cached_l1, first.cached_l3, first.first_position) == (0, 0, 0)
    assert all(output.cached_l1 == -1 for output in service.outputs[key][1:])
    service.assert_nothing_held()


def test_a_long_prompt_is_computed_in_chunks_within_the_budget(emulated_service, emulated_continuation):
    service = emulated_service(max_num_batched_tokens=16)
    prompt = [i % 50 for i in range(100)]
    key = service.submit("a", prompt, max_tokens=3)
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 3)
    assert len(service.runner.steps) == 7 + 2


def test_decodes_go_on_while_a_long_prompt_is_computed(emulated_service):
    service = emulated_service(num_blocks=200)
    short = service.submit("short", [1, 2, 3], max_tokens=40)
    service.step()
    service.submit("long", list(range(300)), max_tokens=1)
    for _ in range(5):
        before = len(service.tokens(short))
        service.step()
        assert len(service.tokens(short)) == before + 1


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(emulated_service):
    service = emulated_service(num_blocks=200)
    service.submit("long", list(range(400)), max_tokens=1)
    service.step()
    short = service.submit("short", [7, 8, 9, 10, 11], max_tokens=1)
    service.step()
    assert service.finish(short) == "length"


@pytest.mark.parametrize("length", [8, 9, 7])
def test_a_repeated_prompt_is_a_hit_but_its_last_token_is_computed(emulated_service, emulated_continuation, length):
    service = emulated_service()
    prompt = list(range(length))
    first = service.submit("a", prompt, max_tokens=4)
    service.run()
    computed = service.runner.computed_tokens
    second = service.submit("b", prompt, max_tokens=4)
    service.run()
    assert service.tokens(first) == service.tokens(second) == emulated_continuation(prompt, 4)
    cached = service.outputs[second][0].cached_l1
    assert cached == (length - 1) // 4 * 4 <= length - 1
    assert service.runner.computed_tokens - computed == length - cached + 3
    service.assert_nothing_held()


def test_other_tenants_share_nothing(emulated_service):
    service = emulated_service()
    service.submit("a", list(range(16)), max_tokens=1)
    service.run()
    other = service.submit("b", list(range(16)), max_tokens=1, hash_salt=b"other tenant 16b")
    service.run()
    assert service.outputs[other][0].cached_l1 == 0


def test_a_stop_token_ends_the_request_and_is_part_of_the_output(emulated_service, emulated_continuation):
    service = emulated_service()
    prompt = [5, 6, 7]
    expected = emulated_continuation(prompt, 5)
    key = service.submit("a", prompt, max_tokens=9, stop_token_ids=[expected[2]])
    service.run()
    assert service.tokens(key) == expected[:3]
    assert service.finish(key) == "stop"
    service.assert_nothing_held()


def test_a_stop_token_before_min_tokens_does_not_end_the_request(emulated_service, emulated_continuation):
    service = emulated_service()
    expected = emulated_continuation([5, 6, 7], 6)
    key = service.submit("a", [5, 6, 7], max_tokens=6, min_tokens=5, stop_token_ids=[expected[2]])
    service.run()
    assert service.tokens(key) == expected


def test_one_token_is_one_token(emulated_service):
    service = emulated_service()
    key = service.submit("a", [1], max_tokens=1)
    service.run()
    assert len(service.tokens(key)) == 1
    assert len(service.runner.steps) == 1
    service.assert_nothing_held()


def test_an_earlier_attempts_output_counts(emulated_service, emulated_continuation):
    service = emulated_service()
    expected = emulated_continuation([1, 2, 3], 6)
    key = service.submit("a", [1, 2, 3, *expected[:2]], prompt_tokens=3, max_tokens=6, key=RequestKey("a", 0, 1))
    service.run()
    assert service.outputs[key][0].first_position == 2
    assert service.tokens(key) == expected[2:]
    done = service.submit("b", [1, 2, 3, *expected], prompt_tokens=3, max_tokens=6)
    service.run()
    assert (service.tokens(done), service.finish(done)) == ([], "length")


def test_what_can_never_fit_is_refused_with_the_numbers(emulated_service):
    service = emulated_service(num_blocks=8)
    pool = service.submit("pool", list(range(30)), max_tokens=5)
    service.runner.context_tokens = 4096
    context = service.submit("context", [1] * 10, max_tokens=5000)
    service.run()
    assert "need 9 blocks, the pool has 8" in service.outputs[pool][-1].error.message
    assert service.outputs[context][-1].error.code == "CONTEXT_TOO_LONG"
    assert "4096" in service.outputs[context][-1].error.limit
    fits = service.submit("fits", list(range(30)), max_tokens=3)
    service.run()
    assert service.finish(fits) == "length"
    service.assert_nothing_held()


@pytest.mark.parametrize(
    ("token_ids", "options", "field"),
    [
        ([], {}, "token_ids"),
        ([1, 5000], {}, "token_ids"),
        ([1], {"max_tokens": 0}, "sampling.max_tokens"),
        ([1], {"logit_bias": {4000: 1.0}}, "sampling.logit_bias"),
    ],
)
def test_bad_input_is_refused_by_field_and_leaves_nothing(emulated_service, token_ids, options, field):
    service = emulated_service()
    key = service.submit("a", token_ids, **options)
    service.step()
    error = service.outputs[key][-1].error
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
    service.assert_nothing_held()


def test_a_full_waiting_queue_refuses(emulated_service):
    service = emulated_service(max_waiting_requests=2)
    keys = [service.submit(f"r{i}", [i], max_tokens=1) for i in range(3)]
    service.run()
    assert service.outputs[keys[2]][-1].error.code == "RESOURCE_EXHAUSTED"
    assert [service.finish(key) for key in keys[:2]] == ["length", "length"]


def test_abort_ends_a_request_in_any_state(emulated_service):
    service = emulated_service(max_num_seqs=2)
    running, partial, waiting = (
        service.submit("a", [1, 2], max_tokens=50),
        service.submit("b", list(range(90)), max_tokens=5),
        service.submit("c", [3], max_tokens=5),
    )
    service.step()
    for key in (running, partial, waiting, RequestKey("unknown")):
        service.engine.handle(Abort(key))
    service.run()
    assert [service.finish(key) for key in (running, partial, waiting)] == ["aborted"] * 3
    service.assert_nothing_held()


@pytest.mark.parametrize("end", ["abort", "deadline"])
@pytest.mark.parametrize("leg", ["prefill", "whole"])
def test_what_ends_a_request_in_mid_step_keeps_it_out_of_the_next(emulated_service, leg, end):
    service = emulated_service(max_num_batched_tokens=8)
    length = 100 if leg == "prefill" else 6
    key = service.submit("a", list(range(length)), stage=leg, max_tokens=500, deadline_s=5.0)
    other = service.submit("b", [900] * 5, max_tokens=30)
    for _ in range(4):
        service.step()

    def in_mid_step() -> None:
        if end == "abort":
            service.engine.handle(Abort(key))
        else:
            service.now_s = 5.0

    service.runner.on_step = in_mid_step
    service.step()
    service.runner.on_step = lambda: None
    service.step()
    last = service.runner.steps[-1]
    running = service.engine.scheduler.state.running
    assert service.finish(key) == ("aborted" if end == "abort" else "error")
    assert [row.row for row in last.rows] == [request.row for request in running]
    assert key not in service.engine.scheduler.state.requests
    service.run()
    assert service.finish(other) == "length"
    service.assert_nothing_held()


def test_a_deadline_ends_waiting_and_running_requests(emulated_service):
    service = emulated_service(max_num_seqs=1, prefill_policy="fcfs")
    running = service.submit("a", [1, 2], max_tokens=100, deadline_s=0.5)
    waiting = service.submit("b", [3], max_tokens=5, deadline_s=0.2)
    service.run()
    assert service.outputs[running][-1].error.code == "DEADLINE_EXCEEDED"
    assert service.outputs[waiting][-1].error.code == "DEADLINE_EXCEEDED"
    assert len(service.tokens(running)) > 10
    service.assert_nothing_held()


def test_a_request_without_credit_keeps_its_kv_and_is_skipped_alone(emulated_service, emulated_continuation):
    service = emulated_service()
    slow = service.submit("slow", [1, 2, 3], max_tokens=10, credit_tokens=4)
    fast = service.submit("fast", [4, 5, 6], max_tokens=30)
    service.run()
    assert len(service.tokens(slow)) == 4
    assert service.finish(fast) == "length"
    assert service.engine.cache.used_blocks > 0
    service.engine.handle(AddCredit(slow, 100))
    service.run()
    assert service.tokens(slow) == emulated_continuation([1, 2, 3], 10)
    service.assert_nothing_held()


def test_a_stalled_reader_is_ended_by_name(emulated_service):
    service = emulated_service(credit_stall_s=5.0)
    stalled = service.submit("stalled", [1, 2, 3], max_tokens=10, credit_tokens=2)
    never = service.submit("never", [1, 2, 3, 4], max_tokens=10, credit_tokens=0)
    service.run()
    assert service.engine.next_timer_s == pytest.approx(5.0, abs=0.2)
    service.now_s = 5.5
    service.run()
    for key in (stalled, never):
        assert service.outputs[key][-1].error.code == "RESOURCE_EXHAUSTED"
    service.assert_nothing_held()


def test_steps_that_commit_several_tokens_stop_where_one_by_one_would(emulated_service, emulated_continuation):
    service = emulated_service()
    service.runner.step_tokens = 3
    limits = service.engine.scheduler.state.limits
    object.__setattr__(limits, "step_tokens", 3)
    prompt = list(range(9))
    expected = emulated_continuation(prompt, 12)
    plain = service.submit("plain", prompt, max_tokens=10)
    stopped = service.submit("stopped", prompt, max_tokens=10, stop_token_ids=[expected[4]])
    service.run()
    assert service.tokens(plain) == expected[:10]
    assert service.tokens(stopped) == expected[:5]
    service.assert_nothing_held()


def test_a_cache_reset_acts_on_an_idle_engine(emulated_service):
    service = emulated_service()
    service.submit("a", list(range(20)), max_tokens=1)
    service.run()
    assert service.engine.cache.cached_blocks == 5
    service.engine.handle(ResetCache())
    assert not service.step()
    assert type(service.reports[-1].kv_events[-1]).__name__ == "BlocksCleared"
    assert service.reports[-1].load.cached_blocks == 0


def test_higher_priority_is_admitted_first_and_age_catches_up(emulated_service):
    service = emulated_service(max_num_seqs=1, priority_aging_s=1.0)
    service.submit("busy", [1], max_tokens=5)
    service.step()
    old = service.submit("old", [2], max_tokens=1)
    service.now_s = 0.5
    urgent = service.submit("urgent", [3], max_tokens=1, priority=1)
    service.now_s = 3.0
    late = service.submit("late", [4], max_tokens=1, priority=1)
    service.run()
    order = [output.key for report in service.reports for output in report.outputs if output.finish]
    assert [key.request_id for key in order] == ["busy", urgent.request_id, old.request_id, late.request_id]


@pytest.mark.parametrize(
    ("start", "end", "budget", "interval", "expected"),
    [
        (0, 100, 32, 0, 32),
        (0, 10, 32, 0, 10),
        (0, 100, 32, 16, 32),
        (0, 100, 30, 16, 16),
        (0, 100, 7, 16, 7),
        (7, 100, 7, 16, 7),
        (7, 100, 12, 16, 9),
        (0, 20, 32, 16, 16),
        (16, 20, 32, 16, 4),
        (0, 32, 64, 16, 16),
        (16, 32, 64, 16, 16),
        (5, 5, 9, 16, 0),
    ],
)
def test_chunks_end_at_snapshot_boundaries(start, end, budget, interval, expected):
    assert chunk_tokens(start, end, budget, interval) == expected
