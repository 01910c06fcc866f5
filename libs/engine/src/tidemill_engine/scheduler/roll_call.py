"""Requests that the service has and the scheduler has not, or the other way round: neither may wait for the other.

Commands and reports keep their order, so at the time of a roll call the two must agree: every submit and abort before
it has been handled here, and every last output before its answer has been seen there.
"""

from collections.abc import Iterable

from tidemill_engine.messages import RequestKey, RollAnswer
from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.lifecycle import add_credit, end, leave_runner, release_kv, set_apart
from tidemill_engine.scheduler.state import SchedulerState, log


def call_roll(state: SchedulerState, keys: Iterable[RequestKey]) -> None:
    """Ends what the service does not have, drops what no part of the scheduler would touch again, and answers."""
    wanted = set(keys)
    for request in [request for request in state.requests.values() if not _is_tended(state, request)]:
        log.error("request_lost", request_id=request.key.request_id, phase=request.phase.value)
        _drop(state, request)
    unowned = [request for key, request in state.requests.items() if key not in wanted]
    for request in unowned:
        log.warning("request_unowned", request_id=request.key.request_id, phase=request.phase.value)
        end(state, request, "aborted")
    missing = [key for key in wanted if key not in state.requests]
    receiving = [key for key, request in state.transferring.items() if request.phase is Phase.RECEIVING]
    held = list(state.held)
    if missing or receiving or held or unowned:
        state.roll_answers.append(RollAnswer(missing, receiving, held, len(unowned)))


def restore_credit(state: SchedulerState, emit_until: Iterable[tuple[RequestKey, int]]) -> None:
    """Gives requests that stand still without credit what was lost of it: what the gateway gave before is here by now,
    or will never be."""
    num_restored = 0
    for key, until in emit_until:
        request = state.requests.get(key)
        if request is None or request.credit_tokens > 0:
            continue
        lost = until - request.num_output_tokens - request.credit_tokens
        if lost > 0:
            log.warning("credit_lost", request_id=key.request_id, tokens=lost)
            add_credit(state, request, lost)
            num_restored += 1
    if num_restored:
        state.roll_answers.append(RollAnswer([], [], [], 0, num_restored))


def _is_tended(state: SchedulerState, request: Request) -> bool:
    """Whether the part of the scheduler that its phase names knows the request."""
    match request.phase:
        case Phase.WAITING:
            return request in state.waiting
        case Phase.ONBOARDING | Phase.RECEIVING:
            return state.transferring.get(request.key) is request
        case Phase.RUNNING:
            return request in state.running
        case Phase.HELD:
            return state.held.get(request.key) is request
        case Phase.FINISHED:
            return False


def _drop(state: SchedulerState, request: Request) -> None:
    """Forgets the request from wherever it still is, and gives back what it holds."""
    if request in state.waiting:
        state.waiting.remove(request)
    if request in state.running:
        leave_runner(state, request)
    elif request.row >= 0:
        state.rows.give_back(request.row)
        if request.in_runner:
            state.freed_rows.append(request.row)
    for phase in (state.transferring, state.held):
        if phase.get(request.key) is request:
            del phase[request.key]
    if request.phase in (Phase.ONBOARDING, Phase.RECEIVING) and request.seq is not None:
        set_apart(state, request)
    release_kv(state, request)
    request.phase = Phase.FINISHED
    del state.requests[request.key]
    state.shares.leave(request.tenant)
