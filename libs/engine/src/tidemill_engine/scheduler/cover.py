"""How many tokens, and so blocks, a request needs room for at each point of its life."""

from tidemill_engine.request import Request
from tidemill_engine.scheduler.state import SchedulerState


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def is_reserved(state: SchedulerState, request: Request) -> bool:
    """Preempted often enough: it is admitted with all it can ever need, and never preempted again."""
    return request.num_preemptions >= state.settings.max_preemptions


def step_cover(state: SchedulerState, request: Request) -> int:
    """Tokens that must have blocks before a step that commits up to `step_tokens` for the request."""
    return len(request.tokens) + state.limits.step_tokens - 1


def final_cover(state: SchedulerState, request: Request) -> int:
    """Most tokens that the request will ever have blocks for; the last output token's KV is never computed. One whose
    output may outgrow the whole pool gets what there is, and ends when it does."""
    if request.stage == "prefill":
        return len(request.tokens)
    most = max(len(request.tokens), request.max_len - 1) + state.limits.step_tokens - 1
    return max(len(request.tokens), min(most, state.cache.num_blocks * state.settings.block_size))


def initial_cover(state: SchedulerState, request: Request) -> int:
    """Tokens that get blocks at admission: all known ones, and the pending one where KV comes from prefill."""
    if is_reserved(state, request):
        return final_cover(state, request)
    return len(request.tokens) + (1 if request.stage == "decode" else 0)


def admission_cover(state: SchedulerState, request: Request) -> int:
    """Tokens that admission must find room for: known ones and headroom for output."""
    final = final_cover(state, request)
    wanted = final if is_reserved(state, request) else len(request.tokens) + state.settings.admission_headroom_tokens
    return max(min(wanted, final), initial_cover(state, request))


def growing(state: SchedulerState) -> list[Request]:
    """Admitted requests whose KV grows here."""
    admitted = [*state.running, *state.transferring.values()]
    return [request for request in admitted if is_growing(request)]


def is_growing(request: Request) -> bool:
    """Whether the KV of an admitted request grows here."""
    return request.stage != "prefill" and request.seq is not None


def headroom_blocks(state: SchedulerState, request: Request) -> int:
    """Blocks that a growing request lacks of its headroom."""
    assert request.seq is not None
    ahead = min(len(request.tokens) + state.settings.admission_headroom_tokens, final_cover(state, request))
    return max(0, num_blocks(ahead, state.settings.block_size) - len(request.seq.block_ids))


def growth_blocks(state: SchedulerState) -> int:
    """Blocks that admitted requests are going to take within their headroom; admission leaves them alone."""
    return sum(headroom_blocks(state, request) for request in growing(state))
