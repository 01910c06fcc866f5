"""What the service learns of a prefill-stage request, so that it can send KV while later chunks are computed."""

from tidemill_engine.messages import PrefillProgress, StateExported
from tidemill_engine.request import Request
from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.scheduler.state import SchedulerState


def report_progress(state: SchedulerState, request: Request, *, final: bool) -> None:
    """Tells the service which further blocks it may send, and how long the rest of the prompt takes."""
    assert request.seq is not None
    computed, block_size = request.num_computed_tokens, state.settings.block_size
    first, full = request.num_reported_blocks, computed // block_size
    last = num_blocks(computed, block_size) if final else full
    total = len(request.tokens) - (1 if final else 0)
    state.notices.append(
        PrefillProgress(
            request.key,
            computed_tokens=computed,
            total_tokens=total,
            first_block=first,
            block_ids=request.seq.block_ids[first:last],
            block_hashes=request.seq.hashes[first:full],
            remaining_s=state.load.cost.prefill_s(total - computed),
            final=final,
            sequence_slot=request.sequence_slot,
        )
    )
    request.num_reported_blocks = last


def export_state(state: SchedulerState, request: Request) -> None:
    """Answers ExportState for a held request."""
    request.export_wanted = False
    state.notices.append(StateExported(request.key, request.state()))
