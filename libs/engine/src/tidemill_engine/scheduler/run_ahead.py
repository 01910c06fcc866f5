"""The decode step after one whose tokens are not known yet, so that the device need not wait for the host.

It holds the same rows, each one token further. A request that turns out to have ended computes one token too many;
nobody reads that token, and its KV lies behind all tokens that other requests can share.
"""

from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState
from tidemill_engine.step import ScheduledRow, SchedulerOutput


def plan_ahead(state: SchedulerState, plan: StepPlan, now_s: float) -> StepPlan | None:
    """What follows `plan`, which is not committed; None where anything but its tokens is to be decided first."""
    if plan.chunks or not _is_quiet(state, now_s):
        return None
    going_on = [request for request in plan.decodes if request.phase is Phase.RUNNING]
    if len(going_on) != len(state.running) or state.cache.available_blocks < len(going_on):
        return None
    # The pending token may be a request's last one, which is not computed.
    going_on = [request for request in going_on if len(request.tokens) + 1 < request.max_len]
    if not going_on or not all(_may_go_on(request) for request in going_on):
        return None
    ahead = StepPlan(plan.budget)
    for request in going_on:
        ahead.decodes[request] = _grow(state, request)
    return ahead


def output_ahead(plan: StepPlan, step: int) -> SchedulerOutput:
    """The step of a plan made by `plan_ahead`; rows that ended meanwhile are freed by the next `schedule`."""
    rows = []
    for request, grown in plan.decodes.items():
        rows.append(ScheduledRow(request.row, request.num_computed_tokens + 1, 1, grown, True))
        request.last_step = step
    return SchedulerOutput(step=step, rows=rows)


def _is_quiet(state: SchedulerState, now_s: float) -> bool:
    """Nothing waits for a decision of the scheduler."""
    waits = len(state.waiting) or state.transferring or state.suspending or state.timers.next_due_s <= now_s
    return not (waits or state.has_sequence_state or state.limits.step_tokens > 1)


def _may_go_on(request: Request) -> bool:
    """The pending token leaves credit for another, and no constraint must see it first."""
    return request.credit_tokens > 1 and request.stage != "prefill" and request.sampling.grammar is None


def _grow(state: SchedulerState, request: Request) -> list[int]:
    assert request.seq is not None
    needed = len(request.tokens) + 1
    if needed <= len(request.seq.block_ids) * state.settings.block_size:
        return []
    grown = state.cache.allocate(request.seq, needed)
    assert grown is not None, "there was a block for each row"
    return grown
