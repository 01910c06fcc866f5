"""When a prefill asks for its decode placement: as late as the transfer allows. Pure."""

from collections.abc import Sequence

from tidemill_worker.requests import LiveRequest


def due_requests(
    prefilling: Sequence[LiveRequest], *, chunk_tokens: int, kv_bytes_per_token: int, transfer_bytes_per_s: float
) -> list[LiveRequest]:
    """Requests whose hand-over is due and not yet announced.

    Due when the remaining seconds of prefill are no more than the transfer's, or when no more than one chunk of tokens
    remains, those of earlier requests in the queue included.
    """
    due = []
    tokens_ahead = 0
    for request in prefilling:
        tokens_ahead += request.remaining_tokens
        if (
            request.goes_on
            and not request.due_sent
            and _is_due(request, tokens_ahead, chunk_tokens, kv_bytes_per_token / transfer_bytes_per_s)
        ):
            due.append(request)
    return due


def _is_due(request: LiveRequest, tokens_ahead: int, chunk_tokens: int, transfer_s_per_token: float) -> bool:
    progress = request.progress
    if progress.final or tokens_ahead <= chunk_tokens:
        return True
    started = progress.computed_tokens > 0
    if started and request.remaining_tokens <= chunk_tokens:
        return True
    return started and progress.remaining_s <= progress.total_tokens * transfer_s_per_token
