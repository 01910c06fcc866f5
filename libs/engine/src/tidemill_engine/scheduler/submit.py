"""What the engine refuses at once, with the numbers."""

from tidemill_engine.messages import EngineError, Submit
from tidemill_engine.request import Request
from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.scheduler.state import SchedulerState


def check_submit(state: SchedulerState, submit: Submit) -> EngineError | None:
    """Why the message cannot become a request; the gateway validates first, so this guards the rank."""
    vocab_size = state.limits.vocab_size
    if not 1 <= submit.prompt_tokens <= len(submit.token_ids):
        message = f"{submit.prompt_tokens} prompt tokens of {len(submit.token_ids)} tokens"
        return EngineError("INVALID_ARGUMENT", message, "token_ids", "at least 1 token")
    if submit.sampling.max_tokens < 1:
        return EngineError("INVALID_ARGUMENT", "max_tokens is below 1", "sampling.max_tokens", "1 token")
    ids = [("token_ids", submit.token_ids), ("sampling.logit_bias", list(submit.sampling.logit_bias))]
    for name, token_ids in ids:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return EngineError("INVALID_ARGUMENT", "a token id is outside the vocabulary", name, f"{vocab_size} tokens")
    if submit.deadline_s <= 0:
        return EngineError("DEADLINE_EXCEEDED", "the deadline had passed on arrival")
    if len(state.waiting) >= state.settings.max_waiting_requests:
        limit = f"{state.settings.max_waiting_requests} requests"
        return EngineError("RESOURCE_EXHAUSTED", "the waiting queue is full", "", limit)
    return None


def check_fit(state: SchedulerState, request: Request) -> EngineError | None:
    """Why the request can never run here: the context or the whole pool is too small for it."""
    prompt, max_tokens, context = request.prompt_tokens, request.sampling.max_tokens, state.max_context_tokens
    if prompt + max_tokens > context:
        message = f"{prompt} prompt tokens + {max_tokens} output tokens exceed the context of {context} tokens"
        return EngineError("CONTEXT_TOO_LONG", message, "token_ids", f"{context} tokens")
    block_size, pool = state.settings.block_size, state.cache.num_blocks
    # Output may be shorter than max_tokens: a request that outgrows the pool ends when it does.
    known = len(request.tokens)
    needed = num_blocks(known if request.stage == "prefill" else known + state.limits.step_tokens, block_size)
    if needed > pool:
        message = f"{known} tokens need {needed} blocks, the pool has {pool}"
        return EngineError("CONTEXT_TOO_LONG", message, "token_ids", f"{pool * block_size} tokens")
    return None
