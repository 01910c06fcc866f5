"""Whether a request whose KV will grow may be admitted, and who gives way when the pool runs full.

    use of the pool   what happens
    high mark         is reported: routers send elsewhere; runaways leave while others wait for room
    all of it         somebody was preempted since others grew: admission of growing requests pauses
    low mark          both are over (`_HYSTERESIS` below high)

Between mark and end nobody is kept out: as long as what ends gives more room than what runs takes, nobody has to be.

Besides, nobody is admitted whose expected growth, with everybody else's, would pass the high mark, or who would make
decode steps slower than targets allow. Past the mark one runaway at a time is offered to other instances, which take
it with its KV; who would be preempted next is offered as well once blocks run out. While somebody is kept out, one that
no instance took within `move_wait_s` gives its blocks back, unless the first in the queue is predicted to find room so
soon that computing the runaway again would cost everybody more time together than those who wait would win.
With nothing else running there is nothing to wait for: then all are admitted.
"""

import math

import numpy as np

from tidemill_engine.messages import RunawayFound
from tidemill_engine.request import Request
from tidemill_engine.scheduler.cover import is_reserved
from tidemill_engine.scheduler.kv_forecast import peak_blocks, seconds_to_room
from tidemill_engine.scheduler.lifecycle import preempt
from tidemill_engine.scheduler.moves import offer, wait_for_move
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState, log

_HYSTERESIS = 0.1
_CHECK_TOKENS = 64
"""Output tokens between two looks at a request."""
_REPEATED_TOKENS = 256
_LONGEST_PERIOD = 64
_FAR_PAST = 4.0
"""Times the length that 99 % of the class stay below."""


def update_pause(state: SchedulerState) -> None:
    """Sets or clears what use of the pool asks for; to be called once for each step."""
    mark = state.settings.kv_high_water
    use = state.cache.used_blocks / state.cache.num_blocks
    outgrown, state.outgrown = state.outgrown and mark <= 1.0, False
    if use >= mark or outgrown:
        state.past_mark = True
        state.admission_paused |= outgrown
    elif use < mark - _HYSTERESIS:
        state.past_mark = state.admission_paused = False


def is_paused(state: SchedulerState, request: Request) -> bool:
    """Whether the pause keeps the request out, whatever room it needs."""
    return state.admission_paused and request.stage != "prefill" and bool(state.running or state.transferring)


def may_grow(state: SchedulerState, request: Request) -> bool:
    """Whether the request may join those whose KV grows."""
    if request.stage == "prefill" or not (state.running or state.transferring):
        return True
    if is_paused(state, request) or not _in_time(state, request):
        return False
    if not state.settings.forecast_growth or is_reserved(state, request):
        return True
    fits = peak_blocks(state, request) <= state.settings.kv_high_water * state.cache.num_blocks
    state.room_wanted |= not fits
    return fits


def _in_time(state: SchedulerState, request: Request) -> bool:
    """Whether decode steps stay within the targets of all, times `most_tpot_load`."""
    most = state.settings.most_tpot_load
    if not most:
        return True
    decoding = [r for r in state.running if r.is_decoding]
    targets = [r.slo_tpot_s for r in (*decoding, request) if r.slo_tpot_s > 0]
    if not decoding or not targets:
        return True
    context = sum(len(r.tokens) for r in decoding) + len(request.tokens)
    return state.load.cost.model.decode_step_s(len(decoding) + 1, context) <= most * min(targets)


def look_for_runaway(state: SchedulerState, request: Request, num_new: int) -> None:
    """Marks a request whose output repeats itself, or has got far longer than its class's."""
    emitted = request.num_output_tokens
    if request.is_runaway or emitted // _CHECK_TOKENS == (emitted - num_new) // _CHECK_TOKENS:
        return
    usual = state.lengths.upper(request.output_class, 0.99)
    reason = ""
    if usual is not None and emitted > _FAR_PAST * usual:
        reason = f"{emitted} output tokens, 99 % of its class stay below {usual:.0f}"
    elif period := repeats_with(request.tokens.view()[request.prompt_tokens :]):
        reason = f"its last {_REPEATED_TOKENS} output tokens repeat each {period}"
    if reason:
        request.is_runaway = True
        state.load.runaways_total += 1
        state.notices.append(RunawayFound(request.key, emitted, reason))
        log.info("runaway", request_id=request.key.request_id, reason=reason)


def repeats_with(output: "np.typing.NDArray[np.uint32]") -> int:
    """The period with which the end of an output repeats itself; 0: it does not."""
    if len(output) < _REPEATED_TOKENS:
        return 0
    tail = output[-_REPEATED_TOKENS:]
    for period in range(1, _LONGEST_PERIOD + 1):
        if tail[-1] == tail[-1 - period] and bool(np.all(tail[period:] == tail[:-period])):
            return period
    return 0


def relieve(state: SchedulerState, plan: StepPlan, now_s: float) -> None:
    """Offers to other instances what takes room, and preempts a runaway that none takes while others wait: it comes
    back after them, or after `runaway_wait_s`."""
    wanted, state.room_wanted = state.past_mark or state.room_wanted, False
    if not wanted:
        return
    victim = _longest_runaway(state)
    if state.past_mark:
        _offer_at_the_mark(state, victim, now_s)
    waiting = [r for r in state.waiting if r.stage != "prefill" and not is_set_back(state, r, now_s)]
    if state.settings.kv_high_water > 1.0 or not waiting:
        return
    if victim is None or wait_for_move(state, victim, now_s):
        return
    # Its recompute holds up all who run and wait; that room comes sooner helps those who wait.
    worth_s = state.recompute_s(victim) * (1.0 + len(state.running) / len(waiting))
    if _finds_room_sooner(state, waiting[0], worth_s, now_s):
        return
    preempt(state, victim)
    plan.drop(victim)
    victim.set_back_s = now_s


def is_set_back(state: SchedulerState, request: Request, now_s: float) -> bool:
    """It gave way as a runaway, and its time to wait for all others is not over."""
    return request.set_back_s >= 0 and now_s < request.set_back_s + state.settings.runaway_wait_s


def _finds_room_sooner(state: SchedulerState, head: Request, worth_s: float, now_s: float) -> bool:
    """Whether the first in the queue is predicted to find room within `worth_s` though nobody gives way. Where that was
    predicted wrongly, it is all the time that it waits for nothing."""
    if head.room_sought_s < 0:
        head.room_sought_s = now_s
    blocks, low = state.cache.num_blocks, state.settings.kv_high_water - _HYSTERESIS
    most_used = math.floor(low * blocks) if is_paused(state, head) else blocks
    until_s = head.room_sought_s + worth_s
    if now_s >= until_s or seconds_to_room(state, head, most_used) >= worth_s:
        return False
    # Where nothing runs meanwhile, only this ends the wait.
    state.timers.at(until_s, lambda *_: None, head.key)
    return True


def _longest_runaway(state: SchedulerState) -> Request | None:
    runaways = [r for r in state.running if r.is_runaway and r.set_back_s < 0 and not is_reserved(state, r)]
    return max(runaways, key=lambda request: len(request.tokens), default=None)


def _offer_at_the_mark(state: SchedulerState, runaway: Request | None, now_s: float) -> None:
    """A runaway, or who would be preempted next, goes to an instance with room, if there is one."""
    if runaway is not None:
        offer(state, runaway, now_s)
        return
    if state.cache.available_blocks >= len(state.running):
        return
    decoding = [r for r in state.running if r.is_decoding and r.stage != "prefill" and not is_reserved(state, r)]
    if len(decoding) > 1:
        offer(state, max(decoding, key=lambda r: r.queue_rank), now_s)
