"""From a plan to the serialisable step that every rank runs."""

from tidemill_engine.request import Request
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.state import SchedulerState
from tidemill_engine.step import NewRequest, ScheduledRow, SchedulerOutput, SnapshotCopy


def build_output(state: SchedulerState, plan: StepPlan, step: int) -> SchedulerOutput:
    """Rows with one token come first; a request that the runner does not know yet is introduced."""
    out = SchedulerOutput(step=step, freed_rows=state.freed_rows)
    state.freed_rows = []
    planned = [(request, 1) for request in plan.decodes] + list(plan.chunks.items())
    for request, num_tokens in sorted(planned, key=lambda item: item[1] > 1):
        grown = plan.decodes.get(request, [])
        if not request.in_runner:
            out.new_requests.append(_introduce(request))
            if request.restore_snapshot_id >= 0:
                copy = SnapshotCopy(request.sequence_slot, request.restore_snapshot_id, restore=True)
                out.snapshot_copies.append(copy)
            request.in_runner = True
            grown = []
        end = request.num_computed_tokens + num_tokens
        sample = end == len(request.tokens)
        out.rows.append(ScheduledRow(request.row, request.num_computed_tokens, num_tokens, grown, sample))
        _save_snapshot(state, request, end, out)
        request.last_step = step
    return out


def _introduce(request: Request) -> NewRequest:
    assert request.seq is not None
    filled = request.restore_snapshot_id >= 0 or request.keep_sequence_state
    return NewRequest(
        row=request.row,
        token_ids=request.tokens.to_list(),
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        block_ids=list(request.seq.block_ids),
        sequence_slot=request.sequence_slot,
        reset_sequence_state=not filled,
        grammar_consumed_token_ids=request.tokens.to_list(request.prompt_tokens) if request.sampling.grammar else [],
    )


def _save_snapshot(state: SchedulerState, request: Request, end: int, out: SchedulerOutput) -> None:
    """Keeps the sequence state where this step leaves it at a snapshot boundary. Steps that may commit several tokens
    do not say where they will end, so they keep none."""
    interval = state.limits.snapshot_interval_tokens
    if interval == 0 or end % interval or state.limits.step_tokens > 1:
        return
    assert request.seq is not None
    snapshot_id = state.cache.store_snapshot(request.seq, end)
    if snapshot_id is not None:
        out.snapshot_copies.append(SnapshotCopy(request.sequence_slot, snapshot_id, restore=False))
