"""Decode rows of a step, growth of their blocks, and whom growth preempts."""

from tidemill_engine.messages import EngineError
from tidemill_engine.request import Request
from tidemill_engine.scheduler.cover import is_reserved, num_blocks, step_cover
from tidemill_engine.scheduler.growth_wait import waits_to_grow
from tidemill_engine.scheduler.lifecycle import end, mark_stalled, preempt
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState


def plan_decodes(state: SchedulerState, plan: StepPlan, max_rows: int, now_s: float) -> None:
    """Adds decode rows up to `max_rows` in all: those that waited longest, and among them the strongest grow first."""
    ready = []
    for request in state.running:
        if not request.is_decoding or request in plan.decodes or request in plan.chunks:
            continue
        if request.credit_tokens > 0:
            ready.append(request)
        else:
            mark_stalled(state, request, now_s)
    room = max(0, max_rows - len(plan.decodes))
    if len(ready) > room:
        ready = sorted(ready, key=lambda request: request.last_step)[:room]
    for request in sorted(ready, key=lambda request: request.queue_rank):
        if request in state.running:
            grown = _grow(state, plan, request, now_s)
            if grown is not None:
                plan.decodes[request] = grown


def _grow(state: SchedulerState, plan: StepPlan, request: Request, now_s: float) -> list[int] | None:
    """Blocks that the next step needs beyond those there are; None when the request waits or had to give way."""
    assert request.seq is not None
    needed = step_cover(state, request)
    while True:
        grown = state.cache.allocate(request.seq, needed)
        if grown is not None:
            request.outgrown_since_s = -1.0
            return grown
        if num_blocks(needed, state.settings.block_size) > state.cache.num_blocks:
            end(state, request, "error", _outgrown(state, needed))
            return None
        victim = _weakest(state, request)
        if waits_to_grow(state, request, needed, victim, now_s):
            return None
        preempt(state, victim)
        state.outgrown = True
        plan.drop(victim)
        if victim is request:
            return None


def _outgrown(state: SchedulerState, needed: int) -> EngineError:
    """Not even the whole pool holds the request: waiting for room would be for ever."""
    size, pool = state.settings.block_size, state.cache.num_blocks
    blocks = num_blocks(needed, size)
    message = (
        f"prompt and output have outgrown the KV memory: {needed} tokens need {blocks} blocks, the pool has {pool}"
    )
    return EngineError("RESOURCE_EXHAUSTED", message, "sampling.max_tokens", f"{pool * size} tokens")


def _weakest(state: SchedulerState, request: Request) -> Request:
    """Whom to preempt: stalled ones first, then runaways, then lowest priority and newest. The one in need is a
    candidate itself, so a request never takes blocks from a stronger one. Prefill-stage KV was promised to decode;
    reserved requests have been preempted often enough."""
    candidates = [r for r in state.running if r.stage != "prefill" and not is_reserved(state, r)]
    assert request in candidates, "a reserved request does not grow"
    return max(candidates, key=lambda r: (r.stalled_since_s >= 0, r.is_runaway, r.queue_rank))
