"""How a request changes phase and what it gives back when it does."""

from collections.abc import Hashable

from tidemill_engine.messages import EngineError, FinishReason, Output, RequestKey, TokenLogprobs
from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.state import Reservation, SchedulerState, log
from tidemill_kvcache.hashing import hash_blocks


def emit(
    state: SchedulerState,
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs],
    finish: FinishReason | None = None,
    error: EngineError | None = None,
) -> None:
    """Queues an output; `token_ids` are the last of the request's tokens."""
    output = Output(
        key=request.key,
        first_position=request.num_output_tokens - len(token_ids),
        token_ids=token_ids,
        logprobs=logprobs,
        finish=finish,
        error=error,
    )
    if token_ids and not request.first_output_sent:
        request.first_output_sent = True
        output.cached_l1 = request.num_cached_l1
        output.cached_l2 = request.num_cached_l2
        output.cached_l3 = request.num_cached_l3
        output.queue_s = max(0.0, request.scheduled_s - request.arrival_s)
    state.outputs.append(output)


def leave_runner(state: SchedulerState, request: Request) -> None:
    """Gives the row back."""
    del state.running[request]
    state.rows.give_back(request.row)
    if request.in_runner:
        state.freed_rows.append(request.row)
    request.row = -1
    request.in_runner = False
    request.outgrown_since_s = -1.0
    state.in_flight.remove(request)


def release_kv(state: SchedulerState, request: Request) -> None:
    """Gives blocks and sequence slot back; committed blocks stay cached."""
    state.in_flight.remove(request)
    if request.seq is not None:
        state.cache.free(request.seq)
        request.seq = None
    if request.sequence_slot >= 0:
        state.slots.give_back(request.sequence_slot)
        request.sequence_slot = -1
    request.num_computed_tokens = 0
    request.restore_snapshot_id = -1
    request.keep_sequence_state = False
    request.rounded_kv = False


def set_apart(state: SchedulerState, request: Request) -> None:
    """Takes blocks and slot from the request but keeps them out of reach: a transfer may still write into them."""
    assert request.seq is not None, "a transferring request has blocks"
    state.reservations[request.key] = Reservation(request.seq, request.sequence_slot)
    request.seq, request.sequence_slot = None, -1
    release_kv(state, request)
    limit_s = state.settings.transfer_limit_s + 1.0
    state.timers.at(state.clock() + limit_s, lambda key, _: _reservation_overdue(state, key), request.key)


def settle(state: SchedulerState, key: RequestKey) -> bool:
    """The transfer into a reservation is over; False when there is none."""
    reservation = state.reservations.pop(key, None)
    if reservation is None:
        return False
    state.cache.free(reservation.seq)
    if reservation.sequence_slot >= 0:
        state.slots.give_back(reservation.sequence_slot)
    return True


def _reservation_overdue(state: SchedulerState, key: Hashable) -> None:
    assert isinstance(key, RequestKey)
    if settle(state, key):
        state.load.overdue_reservations_total += 1
        log.warning("reservation_overdue", request_id=key.request_id, choice=key.choice, attempt=key.attempt)


def withdraw(state: SchedulerState, request: Request) -> None:
    """Takes the request out of its phase with all it holds."""
    match request.phase:
        case Phase.WAITING:
            state.waiting.remove(request)
        case Phase.ONBOARDING | Phase.RECEIVING:
            del state.transferring[request.key]
            set_apart(state, request)
        case Phase.RUNNING:
            leave_runner(state, request)
        case Phase.HELD:
            del state.held[request.key]
        case Phase.FINISHED:
            raise AssertionError("a finished request holds nothing")
    release_kv(state, request)


def end(
    state: SchedulerState,
    request: Request,
    finish: FinishReason,
    error: EngineError | None = None,
    token_ids: list[int] | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> None:
    """The request's one last output, after which it holds nothing; a held request had its last output before, unless it
    was suspended and does not go on elsewhere ("prefilled")."""
    if request.phase is not Phase.HELD or (request.is_suspended and finish != "prefilled"):
        emit(state, request, token_ids or [], logprobs or [], finish, error)
    withdraw(state, request)
    request.phase = Phase.FINISHED
    del state.requests[request.key]
    state.shares.leave(request.tenant)


def enqueue(state: SchedulerState, request: Request) -> None:
    """The request waits for admission."""
    request.phase = Phase.WAITING
    request.num_overtaken = 0
    request.room_sought_s = -1.0
    look_up(state, request)
    state.waiting.add(request)


def begin_running(state: SchedulerState, request: Request, now_s: float) -> None:
    """Gives the request a row; the caller has taken it out of its former phase."""
    request.phase = Phase.RUNNING
    request.row = state.rows.take()
    state.running[request] = None
    if request.scheduled_s < 0:
        request.scheduled_s = now_s


def extend_chain(state: SchedulerState, request: Request) -> list[bytes]:
    """Hashes of all full blocks of the request's known tokens."""
    chain, block_size = request.hash_chain, state.settings.block_size
    known = len(chain)
    if (len(request.tokens) // block_size) > known:
        parent = chain[-1] if known else request.chain_root
        chain += hash_blocks(parent, request.tokens.view()[known * block_size :], block_size)
    return chain


def look_up(state: SchedulerState, request: Request) -> int:
    """Leading blocks that are cached now; the request's order of service goes by them."""
    depth = state.cache.cached_depth(extend_chain(state, request))
    request.num_expected_tokens = min(depth * state.settings.block_size, len(request.tokens) - 1)
    return depth


def preempt(state: SchedulerState, request: Request) -> None:
    """Takes a running request's blocks; it computes again what is no longer cached when it is admitted next."""
    log.info("preempt", request_id=request.key.request_id, num_tokens=len(request.tokens))
    leave_runner(state, request)
    release_kv(state, request)
    request.num_preemptions += 1
    state.load.preemptions_total += 1
    enqueue(state, request)


def hold(state: SchedulerState, request: Request, now_s: float) -> None:
    """A prefilled request keeps its KV for decode until Release, Abort or the end of its hold."""
    leave_runner(state, request)
    request.phase = Phase.HELD
    state.held[request.key] = request
    request.held_until_s = now_s + request.hold_s + 1.0
    state.timers.at(request.held_until_s, lambda key, now: _hold_over(state, key, now), request.key)


def _hold_over(state: SchedulerState, key: Hashable, now_s: float) -> None:
    assert isinstance(key, RequestKey)
    request = state.held.get(key)
    if request is None or now_s < request.held_until_s:
        return
    log.warning("hold_expired", request_id=key.request_id, hold_s=request.hold_s)
    if request.is_suspended:
        # Nobody has said where it goes on.
        message = f"suspended for a move that did not come within {request.hold_s:g} s"
        end(state, request, "error", EngineError("WORKER_LOST", message))
    else:
        end(state, request, "aborted")


def mark_stalled(state: SchedulerState, request: Request, now_s: float) -> None:
    """The request is skipped for want of credit; it ends when that lasts too long."""
    if request.stalled_since_s >= 0:
        return
    request.stalled_since_s = now_s
    when_s = now_s + state.settings.credit_stall_s
    state.timers.at(when_s, lambda key, now: _stall_over(state, key, now), request.key)


def _stall_over(state: SchedulerState, key: Hashable, now_s: float) -> None:
    assert isinstance(key, RequestKey)
    request = state.requests.get(key)
    limit_s = state.settings.credit_stall_s
    if request is None or request.stalled_since_s < 0 or now_s - request.stalled_since_s < limit_s:
        return
    message = f"no credit for {limit_s:g} s: the reader is too slow"
    end(state, request, "error", EngineError("RESOURCE_EXHAUSTED", message, "credit_tokens", f"{limit_s:g} s"))


def add_credit(state: SchedulerState, request: Request, tokens: int) -> None:
    """The reader takes so many tokens more."""
    request.credit_tokens += tokens
    if request.credit_tokens > 0:
        request.stalled_since_s = -1.0
