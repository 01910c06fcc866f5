"""Prompt chunks of a step."""

from tidemill_engine.request import Request
from tidemill_engine.scheduler.admission import min_chunk
from tidemill_engine.scheduler.chunks import chunk_tokens
from tidemill_engine.scheduler.lifecycle import mark_stalled
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState


def plan_prefills(state: SchedulerState, plan: StepPlan, now_s: float) -> None:
    """Chunks of prompts that are computed in part, strongest first; the first leaves a quarter of the budget to others,
    so that short prompts do not wait for the whole of a long one."""
    partial = sorted((r for r in state.running if not r.is_decoding), key=lambda request: request.queue_rank)
    shared = len(partial) > 1 or len(state.waiting) > 0
    for index, request in enumerate(partial):
        left = plan.tokens_left
        budget = left - left // 4 if shared and index == 0 else left
        if budget < min(request.num_remaining_tokens, min_chunk(state)) and not plan.is_empty:
            continue
        _plan_chunk(state, plan, request, budget, now_s)


def top_up_prefills(state: SchedulerState, plan: StepPlan, now_s: float) -> None:
    """Gives tokens that nobody else took to the prompts that can use them."""
    for request in sorted((r for r in state.running if not r.is_decoding), key=lambda request: request.queue_rank):
        if plan.tokens_left > 0:
            _plan_chunk(state, plan, request, plan.tokens_left + plan.chunks.get(request, 0), now_s)


def _plan_chunk(state: SchedulerState, plan: StepPlan, request: Request, budget: int, now_s: float) -> None:
    start, known = request.num_computed_tokens, len(request.tokens)
    chunk = chunk_tokens(start, known, budget, state.limits.snapshot_interval_tokens)
    if start + chunk == known and request.credit_tokens <= 0:
        mark_stalled(state, request, now_s)
        chunk -= 1
    if chunk > 0:
        plan.chunks[request] = chunk
