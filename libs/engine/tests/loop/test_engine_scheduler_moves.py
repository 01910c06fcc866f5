"""Moves of running requests, over the emulated runner: who stands still, who takes over, what if none does."""

from typing import Any

import pytest

from tidemill_engine.messages import Abort, KVReady, MoveRefused, Release, RequestKey, Resume, Suspend


def move(source: Any, target: Any, key: RequestKey, prompt: list[int], **options: Any) -> RequestKey:
    """The service's part: suspends, copies KV and sequence state, hands over the state, releases."""
    source.engine.handle(Suspend(key, 1, 30.0))
    source.step()
    report = source.suspended[-1]
    known = report.state.committed_token_ids[:-1]
    moved = target.submit("", known, key=key, stage="decode", prompt_tokens=len(prompt), **options)
    target.step()
    wanted = target.wanted[-1]
    size = source.runner.settings.block_size
    for a, b in zip(report.block_ids[wanted.have_blocks :], wanted.block_ids, strict=True):
        for offset in range(size):
            target.runner.kv[b, offset] = source.runner.kv.get((a, offset), -1)
    if wanted.sequence_slot >= 0:
        target.runner.slots[wanted.sequence_slot] = source.runner.slots[report.sequence_slot]
    target.engine.handle(KVReady(moved, report.state))
    source.engine.handle(Release(key))
    source.step()
    return moved


@pytest.mark.parametrize("snapshot_interval", [0, 8])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_moved_request_says_what_it_would_have_said(
    emulated_service, emulated_continuation, snapshot_interval, after
):
    source, target = (emulated_service(snapshot_interval=snapshot_interval) for _ in range(2))
    prompt = list(range(11))
    key = source.submit("a", prompt, max_tokens=20)
    other = source.submit("other", list(range(50, 60)), max_tokens=30)
    while len(source.tokens(key)) < after:
        source.step()
    move(source, target, key, prompt, max_tokens=20)
    target.run()
    source.run()
    assert target.outputs[key][0].first_position == len(source.tokens(key)) > 0
    assert source.tokens(key) + target.tokens(key) == emulated_continuation(prompt, 20)
    assert (source.finish(key), target.finish(key)) == (None, "length")
    assert source.tokens(other) == emulated_continuation(list(range(50, 60)), 30)
    source.assert_nothing_held()
    target.assert_nothing_held()


def test_it_may_come_back_to_blocks_that_are_still_cached(emulated_service, emulated_continuation):
    one, two = emulated_service(), emulated_service()
    prompt = list(range(11))
    key = one.submit("a", prompt, max_tokens=30)
    for _ in range(6):
        one.step()
    move(one, two, key, prompt, max_tokens=30)
    for _ in range(6):
        two.step()
    move(two, one, key, prompt, max_tokens=30)
    assert one.wanted[-1].have_blocks >= 3
    one.run()
    tokens = [t for service in (one, two) for o in service.outputs[key] for t in o.token_ids]
    assert sorted(tokens) == sorted(emulated_continuation(prompt, 30))
    assert one.finish(key) == "length"
    one.assert_nothing_held()
    two.assert_nothing_held()


@pytest.mark.parametrize("snapshot_interval", [0, 8])
def test_one_that_nobody_takes_goes_on_here(emulated_service, emulated_continuation, snapshot_interval):
    service = emulated_service(snapshot_interval=snapshot_interval)
    prompt = list(range(11))
    key = service.submit("a", prompt, max_tokens=20)
    for _ in range(5):
        service.step()
    service.engine.handle(Suspend(key, 1, 30.0))
    for _ in range(3):
        assert not service.step()
    assert service.engine.scheduler.load_sample().held_requests == 1
    service.engine.handle(Resume(key))
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 20)
    service.assert_nothing_held()


def test_it_waits_for_a_row_when_others_have_taken_its_own(emulated_service, emulated_continuation):
    service = emulated_service(max_num_seqs=1)
    key = service.submit("a", list(range(11)), max_tokens=20)
    for _ in range(5):
        service.step()
    service.engine.handle(Suspend(key, 1, 30.0))
    other = service.submit("b", [7] * 5, max_tokens=20)
    service.step()
    service.engine.handle(Resume(key))
    service.run()
    assert service.tokens(key) == emulated_continuation(list(range(11)), 20)
    assert service.finish(other) == "length"
    service.assert_nothing_held()


def test_one_that_waits_or_computes_its_prompt_stays(emulated_service):
    service = emulated_service(max_num_batched_tokens=8, max_num_seqs=1, max_waiting_requests=4)
    prompting = service.submit("a", list(range(30)), max_tokens=3)
    waiting = service.submit("b", list(range(40, 50)), max_tokens=3)
    service.step()
    for key in (prompting, waiting, RequestKey("unknown")):
        service.engine.handle(Suspend(key, 1, 30.0))
    service.run()
    assert [stay.key for stay in service.stays] == [prompting, waiting]
    assert not service.suspended
    assert (service.finish(prompting), service.finish(waiting)) == ("length", "length")


def test_a_hold_that_nobody_ends_ends_with_an_error_that_is_told(emulated_service):
    service = emulated_service()
    key = service.submit("a", list(range(11)), max_tokens=20)
    for _ in range(5):
        service.step()
    service.engine.handle(Suspend(key, 1, 2.0))
    service.step()
    service.now_s += 3.1
    service.step()
    assert service.outputs[key][-1].error.code == "WORKER_LOST"
    service.assert_nothing_held()


def test_a_reader_is_not_too_slow_while_the_request_stands_still_for_a_move(emulated_service):
    service = emulated_service(credit_stall_s=5.0)
    key = service.submit("a", list(range(11)), max_tokens=20, credit_tokens=3)
    for _ in range(8):
        service.step()
    assert len(service.tokens(key)) == 3
    service.engine.handle(Suspend(key, 1, 30.0))
    service.step()
    service.step(6.0)
    assert key in service.engine.scheduler.state.held
    service.engine.handle(Abort(key))
    service.run()
    service.assert_nothing_held()


def test_an_abort_and_a_second_suspension_leave_nothing(emulated_service):
    service = emulated_service()
    key = service.submit("a", list(range(11)), max_tokens=200)
    for _ in range(5):
        service.step()
    service.engine.handle(Suspend(key, 1, 2.0))
    service.step()
    service.engine.handle(Resume(key))
    service.now_s += 2.5
    service.engine.handle(Suspend(key, 1, 2.0))
    service.step()
    # The end of the first suspension is not the end of the second.
    service.now_s += 1.0
    service.step()
    assert service.engine.scheduler.load_sample().held_requests == 1
    service.engine.handle(Abort(key))
    service.step()
    service.assert_nothing_held()


def crowded(emulated_service: Any, **options: Any) -> Any:
    """Past the high-water mark, with one that waits for room."""
    fields = {"num_blocks": 100, "kv_high_water": 0.5, "admission_headroom_tokens": 4, "move_wait_s": 1.0}
    service = emulated_service(**(fields | options))
    key = service.submit("runaway", [1] * 8, max_tokens=380)
    while service.engine.cache.used_blocks < 50:
        service.step()
    service.engine.scheduler.state.requests[key].is_runaway = True
    service.submit("late", [9] * 210, max_tokens=4)
    service.step()
    return service, key


def test_a_runaway_is_offered_first_and_preempted_only_when_nobody_takes_it(emulated_service):
    service, key = crowded(emulated_service)
    assert [wanted.key for wanted in service.moves_wanted] == [key]
    service.step()
    assert service.engine.scheduler.load_sample().preemptions_total == 0
    service.engine.handle(MoveRefused(key))
    service.step()
    assert service.engine.scheduler.load_sample().preemptions_total == 1
    service.run()
    assert len(service.moves_wanted) == 1
    service.assert_nothing_held()


def test_an_answer_that_does_not_come_is_not_waited_for_longer_than_told(emulated_service):
    service, _ = crowded(emulated_service)
    service.now_s += 1.1
    service.step()
    assert service.engine.scheduler.load_sample().preemptions_total == 1
    service, _ = crowded(emulated_service, move_wait_s=0.0)
    assert not service.moves_wanted
    assert service.engine.scheduler.load_sample().preemptions_total == 1


def test_a_runaway_that_leaves_makes_room_at_once(emulated_service, emulated_continuation):
    service, key = crowded(emulated_service)
    target = emulated_service(num_blocks=200)
    move(service, target, key, [1] * 8, max_tokens=380)
    service.run()
    target.run()
    assert service.engine.scheduler.load_sample().preemptions_total == 0
    assert service.finish(RequestKey("late")) == "length"
    assert service.tokens(key) + target.tokens(key) == emulated_continuation([1] * 8, 380)


def test_a_runaway_past_the_mark_is_offered_though_nobody_waits(emulated_service):
    service = emulated_service(num_blocks=100, kv_high_water=0.5, move_wait_s=1.0)
    key = service.submit("runaway", [1] * 8, max_tokens=380)
    while service.engine.cache.used_blocks < 45:
        service.step()
    service.engine.scheduler.state.requests[key].is_runaway = True
    assert not service.moves_wanted
    service.run()
    assert [wanted.key for wanted in service.moves_wanted] == [key]
    assert service.engine.scheduler.load_sample().preemptions_total == 0
    service.assert_nothing_held()


def test_who_would_be_preempted_next_is_offered_before_it_is(emulated_service):
    service = emulated_service(num_blocks=32, kv_high_water=0.6, admission_headroom_tokens=1, move_wait_s=1.0)
    keys = []
    for i in range(3):
        keys.append(service.submit(f"r{i}", [i] * 8, max_tokens=120))
        service.step()
    while not service.moves_wanted:
        assert service.engine.scheduler.load_sample().preemptions_total == 0
        service.step()
    assert [wanted.key for wanted in service.moves_wanted] == [keys[-1]]
    service.run()
    service.assert_nothing_held()
