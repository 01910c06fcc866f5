"""What the service has and what the scheduler has are compared: neither waits for what the other has forgotten."""

from typing import Any

import pytest

from tidemill_engine.messages import AddCredit, EmitUntil, Report, RequestKey, RollAnswer, RollCall, StepReport
from tidemill_engine.request import Phase


def answer(service: Any, *keys: RequestKey) -> RollAnswer | None:
    """The answer to a roll call of these keys, None when there is nothing to say."""
    return answer_to(service, RollCall(list(keys)))


def answer_to(service: Any, call: RollCall | EmitUntil) -> RollAnswer | None:
    service.engine.handle(call)
    early: list[Report] = []
    _, late = service.engine.step(early.extend)
    answers = [report for report in [*early, *late] if isinstance(report, RollAnswer)]
    assert len(answers) <= 1
    return answers[0] if answers else None


def test_a_roll_call_that_agrees_is_not_answered_and_changes_nothing(emulated_service, emulated_continuation):
    service = emulated_service()
    runs, waits = service.submit("runs", [1, 2, 3], max_tokens=5), service.submit("waits", list(range(200)))
    service.step()
    assert answer(service, runs, waits) is None
    assert answer(service, waits, runs) is None
    service.run()
    assert answer(service) is None


def test_a_submit_that_never_came_is_missing(emulated_service):
    service = emulated_service()
    here, gone = service.submit("here", [1, 2, 3], max_tokens=50), RequestKey("gone")
    service.step()
    found = answer(service, here, gone)
    assert found == RollAnswer(missing=[gone], receiving=[], held=[], num_unowned=0)


def test_an_answer_comes_after_the_ends_of_all_that_it_misses(emulated_service):
    service = emulated_service()
    refused = service.submit("refused", [10_000])
    service.engine.handle(RollCall([refused]))
    _, reports = service.engine.step()
    assert [type(report) for report in reports] == [StepReport, RollAnswer]
    assert [output.key for output in reports[0].outputs] == reports[1].missing == [refused]


def test_a_request_of_which_the_service_knows_nothing_is_ended(emulated_service):
    service = emulated_service(max_num_seqs=1)
    runs, waits = service.submit("runs", [1, 2, 3], max_tokens=50), service.submit("waits", [4, 5, 6])
    service.submit("held", [7, 8, 9], stage="prefill")
    for _ in range(2):
        service.step()
    found = answer(service, waits)
    assert found is not None
    assert found.num_unowned == 2
    service.run()
    assert service.finish(waits) == "length"
    assert runs not in service.engine.scheduler.state.requests
    service.assert_nothing_held()


def test_requests_that_wait_for_kv_or_hold_it_are_named(emulated_service):
    service = emulated_service()
    waits = service.submit("decode", list(range(20)), stage="decode")
    holds = service.submit("prefill", list(range(20)), stage="prefill")
    service.run()
    assert answer(service, waits, holds) == RollAnswer(missing=[], receiving=[waits], held=[holds], num_unowned=0)


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RUNNING, Phase.RECEIVING, Phase.HELD])
def test_a_request_that_no_part_of_the_scheduler_would_touch_is_dropped_with_all_it_holds(emulated_service, phase):
    service = emulated_service(max_num_seqs=2)
    stages = {Phase.RECEIVING: "decode", Phase.HELD: "prefill"}
    for number in range(2 if phase is Phase.WAITING else 0):
        service.submit(f"busy-{number}", [number] * 8, max_tokens=100)
    key = service.submit("lost", list(range(20)), stage=stages.get(phase, "whole"), max_tokens=100)
    for _ in range(2):
        service.step()
    state = service.engine.scheduler.state
    request = state.requests[key]
    assert request.phase is phase
    match phase:
        case Phase.WAITING:
            state.waiting.remove(request)
        case Phase.RUNNING:
            del state.running[request]
        case Phase.RECEIVING:
            del state.transferring[key]
        case _:
            del state.held[key]
    found = answer(service, *state.requests)
    assert found is not None
    assert found.missing == [key]
    service.now_s += 2 * state.settings.transfer_limit_s
    service.run()
    service.assert_nothing_held()


def test_credit_that_was_lost_is_given_once_and_only_to_who_stands_still(emulated_service, emulated_continuation):
    service = emulated_service()
    stalled = service.submit("stalled", [1, 2, 3], max_tokens=30, credit_tokens=4)
    reader_is_slow = service.submit("slow", [4, 5, 6], max_tokens=30, credit_tokens=4)
    going_on = service.submit("going on", [7, 8, 9], max_tokens=300)
    for _ in range(20):
        service.step()
    keys = [stalled, reader_is_slow, going_on, RequestKey("gone")]
    for _ in range(3):
        service.engine.handle(EmitUntil(keys, [10, 4, 300, 5]))
        for _ in range(20):
            service.step()
        assert [len(service.tokens(key)) for key in (stalled, reader_is_slow)] == [10, 4]
    service.engine.handle(AddCredit(stalled, 20))
    service.engine.handle(AddCredit(reader_is_slow, 26))
    service.run()
    assert service.tokens(stalled) == emulated_continuation([1, 2, 3], 30)
    assert service.tokens(reader_is_slow) == emulated_continuation([4, 5, 6], 30)
    service.assert_nothing_held()


def test_restored_credit_is_reported_and_credit_that_is_there_is_not(emulated_service):
    service = emulated_service()
    stalled = service.submit("stalled", [1, 2, 3], max_tokens=30, credit_tokens=2)
    for _ in range(5):
        service.step()
    assert answer_to(service, EmitUntil([stalled], [2])) is None
    found = answer_to(service, EmitUntil([stalled], [6]))
    assert found == RollAnswer(missing=[], receiving=[], held=[], num_unowned=0, num_uncredited=1)
