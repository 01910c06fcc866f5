"""What a finished step brought each of its requests."""

from tidemill_engine.messages import EngineError, FinishReason, TokenLogprobs
from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.decode_guard import look_for_runaway
from tidemill_engine.scheduler.lifecycle import emit, end, hold
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.prefilled import export_state, report_progress
from tidemill_engine.scheduler.state import SchedulerState
from tidemill_engine.step import SampledRow, StepResult


def commit_step(state: SchedulerState, plan: StepPlan, result: StepResult, step_s: float, now_s: float) -> None:
    """Takes the result of the step that `plan` asked for, which took `step_s` seconds."""
    sampled = {row.row: row for row in result.sampled}
    state.load.cost.observe(plan.shape(), step_s)
    _charge_tenants(state, plan, step_s)
    state.steps_since_prefill = 0 if plan.chunks else state.steps_since_prefill + 1
    for request in plan.decodes:
        # A request may have ended after the step was planned: by an earlier step's token, or by an abort.
        if request.phase is Phase.RUNNING:
            _commit_row(state, request, 1, sampled.get(request.row), now_s)
    for request, num_tokens in plan.chunks.items():
        if request.phase is Phase.RUNNING:
            state.order.computed(request, num_tokens, now_s)
            _commit_row(state, request, num_tokens, sampled.get(request.row), now_s)


def _charge_tenants(state: SchedulerState, plan: StepPlan, step_s: float) -> None:
    if not state.shares.contended:
        return
    tokens = dict.fromkeys(plan.decodes, 1) | plan.chunks
    state.shares.charge(tokens, state.requests.values(), state.cache.num_blocks, step_s)


def _commit_row(
    state: SchedulerState, request: Request, num_tokens: int, sampled: SampledRow | None, now_s: float
) -> None:
    assert request.seq is not None
    if request.restore_snapshot_id >= 0:
        state.cache.release_snapshot(request.seq)
        request.restore_snapshot_id = -1
    reached = request.num_computed_tokens + num_tokens
    assert sampled is None or reached == len(request.tokens), "a row was sampled before its last known token"
    kept, finish = _take_tokens(request, sampled) if sampled is not None else (0, None)
    request.num_computed_tokens = reached + max(0, kept - 1)
    _commit_blocks(state, request)
    if sampled is None:
        if request.stage == "prefill":
            report_progress(state, request, final=False)
        return
    _account(state, request, kept, now_s)
    token_ids = request.tokens.to_list(len(request.tokens) - kept)
    logprobs = [TokenLogprobs(*entry) for entry in sampled.logprobs[:kept]]
    if sampled.grammar_error:
        message = f"the grammar cannot go on: {sampled.grammar_error}"
        error = EngineError("INVALID_ARGUMENT", message, "sampling.grammar")
        end(state, request, "error", error, token_ids, logprobs)
    elif finish is not None:
        if not request.is_runaway:
            state.lengths.add(request.output_class, request.num_output_tokens)
        end(state, request, finish, None, token_ids, logprobs)
    elif request.stage != "prefill":
        emit(state, request, token_ids, logprobs)
        look_for_runaway(state, request, kept)
    elif request.release_wanted:
        end(state, request, "prefilled", None, token_ids, logprobs)
    else:
        emit(state, request, token_ids, logprobs, "prefilled")
        report_progress(state, request, final=True)
        hold(state, request, now_s)
        if request.export_wanted:
            export_state(state, request)


def _take_tokens(request: Request, sampled: SampledRow) -> tuple[int, FinishReason | None]:
    """Appends sampled tokens up to the one that ends the request; returns how many and why it ends."""
    for kept, token_id in enumerate(sampled.token_ids, 1):
        request.tokens.append(token_id)
        is_stop = token_id in request.sampling.stop_token_ids
        if is_stop and request.num_output_tokens >= request.sampling.min_tokens:
            return kept, "stop"
        if len(request.tokens) >= request.max_len:
            return kept, "length"
    return len(sampled.token_ids), None


def _commit_blocks(state: SchedulerState, request: Request) -> None:
    assert request.seq is not None
    full_blocks = request.num_computed_tokens // state.settings.block_size
    if full_blocks > len(request.seq.hashes):
        state.cache.commit(request.seq, request.tokens.view(), request.num_computed_tokens)
    state.in_flight.advance(request, full_blocks)


def _account(state: SchedulerState, request: Request, kept: int, now_s: float) -> None:
    request.credit_tokens -= kept
    state.load.output_tokens_total += kept
    if request.last_token_s >= 0 and kept:
        state.load.tpot_s.add(now_s, (now_s - request.last_token_s) / kept)
    elif request.last_token_s < 0 and request.num_cached_l1 >= 0:
        state.load.ttft_s.add(now_s, now_s - request.arrival_s)
    request.last_token_s = now_s
