"""A running request goes on at another instance: it stands still, is fetched with its KV and state, and is released.

    RUNNING --Suspend--> HELD --Release--> gone: the other instance has all of it
                          |---Resume-----> RUNNING: nobody took it

It stands still between two steps, when its last token is known and not yet run through the model, so what travels is
the same as after a prompt. Whoever wants it elsewhere (`offer`) only says so; the service finds out whether it can be.
"""

from tidemill_engine.messages import EngineError, MoveWanted, RequestKey, Stays, Suspended
from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.scheduler.lifecycle import begin_running, end, enqueue, hold, release_kv
from tidemill_engine.scheduler.state import SchedulerState, log


def offer(state: SchedulerState, request: Request, now_s: float) -> None:
    """Asks the service, once, for an instance with room for the request."""
    if request.move_asked_s >= 0 or not state.settings.move_wait_s or not can_stand_still(request):
        return
    request.move_asked_s = now_s
    log.info("move_wanted", request_id=request.key.request_id, num_tokens=len(request.tokens))
    state.notices.append(MoveWanted(request.key))
    state.timers.at(now_s + state.settings.move_wait_s, lambda *_: None, request.key)


def wait_for_move(state: SchedulerState, request: Request, now_s: float) -> bool:
    """Offers a request that has to leave; False once nobody has taken it in time."""
    offer(state, request, now_s)
    if request.move_refused or request.move_asked_s < 0:
        return False
    return now_s < request.move_asked_s + state.settings.move_wait_s


def can_stand_still(request: Request) -> bool:
    """Between two of its output tokens: all but the last one are computed."""
    is_running = request.phase is Phase.RUNNING and request.stage == "whole"
    return is_running and request.is_decoding and request.num_output_tokens > 0


def suspend_all(state: SchedulerState, now_s: float) -> None:
    """Suspends those that were asked for since the last step; to be called while no step is under way."""
    wanted, state.suspending = state.suspending, {}
    for key, command in wanted.items():
        request = state.requests.get(key)
        if request is None:
            continue
        if not can_stand_still(request):
            state.notices.append(Stays(key, command.move_id))
            continue
        request.hold_s = command.hold_s
        request.is_suspended = True
        # Credit now goes to whoever takes over: the reader is not too slow, it is not asked.
        request.stalled_since_s = -1.0
        hold(state, request, now_s)
        state.notices.append(_suspended(state, request, command.move_id))


def resume(state: SchedulerState, key: RequestKey, now_s: float) -> None:
    """A suspended request runs again, or waits for a row and computes what it then lacks."""
    state.suspending.pop(key, None)
    request = state.held.get(key)
    if request is None or not request.is_suspended:
        return
    if now_s >= request.deadline_s:
        end(state, request, "error", EngineError("DEADLINE_EXCEEDED", "the request's deadline has passed"))
        return
    log.info("resume", request_id=key.request_id)
    del state.held[key]
    request.is_suspended = False
    if state.num_active < state.settings.max_num_seqs:
        request.keep_sequence_state = True
        begin_running(state, request, now_s)
    else:
        release_kv(state, request)
        enqueue(state, request)


def _suspended(state: SchedulerState, request: Request, move_id: int) -> Suspended:
    assert request.seq is not None
    size = state.settings.block_size
    return Suspended(
        request.key,
        move_id,
        block_ids=request.seq.block_ids[: num_blocks(request.num_computed_tokens, size)],
        block_hashes=request.seq.hashes[: request.num_computed_tokens // size],
        sequence_slot=request.sequence_slot,
        state=request.state(),
    )
