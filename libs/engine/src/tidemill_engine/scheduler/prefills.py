"""Prompt chunks of a step: of prompts computed in part and of newly admitted ones, in one order."""

from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.admission import Admission
from tidemill_engine.scheduler.chunks import chunk_tokens, min_chunk
from tidemill_engine.scheduler.decode_guard import is_set_back
from tidemill_engine.scheduler.lifecycle import mark_stalled
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState


def plan_prefills(state: SchedulerState, plan: StepPlan, now_s: float) -> None:
    """Gives the step's tokens to prompts, the most urgent first; each takes what it can use."""
    candidates = [request for request in state.running if not request.is_decoding]
    if state.num_active < state.settings.max_num_seqs:
        candidates += state.waiting
    if not candidates:
        return
    admission = Admission(state, plan, now_s)
    ordered = state.shares.arrange(state.order.arrange(candidates, now_s))
    ordered.sort(key=lambda request: is_set_back(state, request, now_s))
    for request in ordered:
        if request.phase is Phase.RUNNING:
            _plan_chunk(state, plan, request, now_s)
        elif request.phase is Phase.WAITING:
            admission.consider(request)


def _plan_chunk(state: SchedulerState, plan: StepPlan, request: Request, now_s: float) -> None:
    budget = plan.tokens_left
    if budget < min(request.num_remaining_tokens, min_chunk(state.settings)) and not plan.is_empty:
        return
    start, known = request.num_computed_tokens, len(request.tokens)
    chunk = chunk_tokens(start, known, budget, state.limits.snapshot_interval_tokens)
    if start + chunk == known and request.credit_tokens <= 0:
        mark_stalled(state, request, now_s)
        chunk -= 1
    if chunk > 0:
        plan.chunks[request] = chunk
