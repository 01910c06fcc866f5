"""KV that comes from elsewhere: hand-over from a prefill instance, and blocks of L3.

Blocks that a transfer may write into are out of everybody's reach until the service says that it is over: an answer
that comes too late finds them in `reservations`, not in another request. The service answers each KVWanted and each
OnboardWanted exactly once, after every receive into those blocks has ended.
"""

from collections.abc import Hashable

from tidemill_engine.messages import EngineError, KVFailed, KVReady, KVWanted, OnboardReady, OnboardWanted, RequestKey
from tidemill_engine.request import Phase, Request
from tidemill_engine.sampling_params import RequestState
from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.scheduler.lifecycle import begin_running, end, enqueue, extend_chain, release_kv, set_apart, settle
from tidemill_engine.scheduler.state import SchedulerState, log
from tidemill_kvcache.sequence import MatchResult


def ask_hand_over(state: SchedulerState, request: Request, match: MatchResult) -> None:
    """The request has blocks and waits for the KV that L1 lacks; its deadline bounds the wait."""
    assert request.seq is not None
    state.waiting.remove(request)
    request.phase = Phase.RECEIVING
    state.transferring[request.key] = request
    known_blocks = num_blocks(len(request.tokens), state.settings.block_size)
    state.notices.append(
        KVWanted(
            request.key,
            have_blocks=match.num_blocks,
            have_hash=request.seq.hashes[-1] if match.num_blocks else b"",
            block_ids=request.seq.block_ids[match.num_blocks : known_blocks],
            sequence_slot=request.sequence_slot,
        )
    )


def kv_ready(state: SchedulerState, message: KVReady, now_s: float) -> None:
    """The wanted KV is in place: the request joins the batch."""
    request = _receiving(state, message.key)
    if request is None:
        return
    assert request.seq is not None
    problem = _check_state(request, message.state)
    if problem:
        _end_received(state, request, EngineError("INTERNAL", f"hand-over state does not fit the request: {problem}"))
        return
    del state.transferring[request.key]
    for token_id in _tokens_beyond(request, message.state):
        request.tokens.append(token_id)
    request.rounded_kv = message.state.rounded_kv
    if request.rounded_kv:
        state.cache.keep_private(request.seq)
    full_blocks = message.state.computed_tokens // state.settings.block_size
    state.cache.adopt(request.seq, full_blocks - len(request.seq.hashes), request.tokens.view())
    request.num_computed_tokens = message.state.computed_tokens
    request.keep_sequence_state = True
    # Should it be preempted later, it computes what it lost.
    request.stage = "whole"
    begin_running(state, request, now_s)
    if len(request.tokens) >= request.max_len:
        end(state, request, "length")


def kv_failed(state: SchedulerState, message: KVFailed) -> None:
    """The hand-over failed and no receive is under way: compute here, or end."""
    request = _receiving(state, message.key)
    if request is None:
        return
    if not message.recompute:
        _end_received(state, request, message.error)
        return
    log.info("hand_over_recompute", request_id=request.key.request_id, reason=message.error.message)
    del state.transferring[request.key]
    release_kv(state, request)
    request.stage = "whole"
    enqueue(state, request)


def wants_onboard(state: SchedulerState, request: Request, match: MatchResult) -> bool:
    """Whether the tiers below are worth asking; decided once for each request."""
    settings = state.settings
    if request.asked_onboard or not settings.onboard_enabled:
        return False
    request.asked_onboard = True
    usable = (len(request.tokens) - 1) // settings.block_size
    return usable - match.num_blocks >= settings.onboard_min_blocks


def ask_onboard(state: SchedulerState, request: Request, match: MatchResult, now_s: float) -> None:
    """The request has blocks and waits for L2 or L3 to fill leading ones, at most `onboard_deadline_s`."""
    assert request.seq is not None
    state.cache.release_snapshot(request.seq)
    state.waiting.remove(request)
    request.phase = Phase.ONBOARDING
    state.transferring[request.key] = request
    request.local_tokens = match.num_tokens
    first, usable = match.num_blocks, (len(request.tokens) - 1) // state.settings.block_size
    wanted = extend_chain(state, request)[first:usable]
    state.in_flight.register(request, first, wanted)
    deadline_s = max(0.0, min(state.settings.onboard_deadline_s, request.deadline_s - now_s))
    state.timers.at(now_s + deadline_s, lambda key, _: _onboard_late(state, key), request.key)
    state.notices.append(
        OnboardWanted(
            request.key,
            first_block=first,
            parent_hash=request.seq.hashes[-1] if first else b"",
            block_hashes=wanted,
            block_ids=request.seq.block_ids[first:usable],
            snapshot_ids=_snapshots_to_fill(state, request, first, usable),
            deadline_s=deadline_s,
        )
    )


def onboard_ready(state: SchedulerState, message: OnboardReady) -> None:
    """Verified blocks become cached, and the request is admitted anew, this time with more in L1."""
    request = state.transferring.get(message.key)
    if request is None or request.phase is not Phase.ONBOARDING:
        settle(state, message.key)
        return
    assert request.seq is not None
    first = len(request.seq.hashes)
    wanted = (len(request.tokens) - 1) // state.settings.block_size - first
    filled = max(0, min(message.num_blocks, wanted))
    for boundary in list(request.seq.pending_snapshots):
        if boundary != message.snapshot_boundary_blocks:
            state.cache.discard_snapshot(request.seq, boundary * state.settings.block_size)
    if filled:
        state.cache.adopt(request.seq, filled, request.tokens.view())
        request.onboarded = True
        request.onboarded_l2_tokens = min(message.num_l2_blocks, filled) * state.settings.block_size
    del state.transferring[request.key]
    release_kv(state, request)
    enqueue(state, request)


def _onboard_late(state: SchedulerState, key: Hashable) -> None:
    assert isinstance(key, RequestKey)
    request = state.transferring.get(key)
    if request is None or request.phase is not Phase.ONBOARDING:
        return
    log.info("onboard_late", request_id=key.request_id)
    del state.transferring[key]
    set_apart(state, request)
    enqueue(state, request)


def _snapshots_to_fill(state: SchedulerState, request: Request, first: int, end_block: int) -> list[int]:
    """For each wanted block a snapshot id where its end is a boundary and there is room, otherwise -1."""
    assert request.seq is not None
    interval, block_size = state.limits.snapshot_interval_tokens, state.settings.block_size
    ids = []
    for boundary in range((first + 1) * block_size, (end_block + 1) * block_size, block_size):
        wanted = interval and boundary % interval == 0
        snapshot_id = state.cache.store_snapshot(request.seq, boundary) if wanted else None
        ids.append(-1 if snapshot_id is None else snapshot_id)
    return ids


def _receiving(state: SchedulerState, key: RequestKey) -> Request | None:
    """The request that waits for this hand-over; otherwise what it left behind is freed."""
    request = state.transferring.get(key)
    if request is None or request.phase is not Phase.RECEIVING:
        settle(state, key)
        return None
    return request


def _end_received(state: SchedulerState, request: Request, error: EngineError) -> None:
    end(state, request, "error", error)
    settle(state, request.key)


def _check_state(request: Request, other: RequestState) -> str:
    """What is wrong with a hand-over state; empty when it fits."""
    known = len(request.tokens)
    if other.version != 1:
        return f"version {other.version} is not known"
    if other.prompt_tokens != request.prompt_tokens or other.computed_tokens != known:
        return (
            f"{other.computed_tokens} tokens computed of {other.prompt_tokens} prompt tokens, "
            f"expected {known} of {request.prompt_tokens}"
        )
    if other.committed_token_ids[:known] != request.tokens.to_list():
        return "its tokens are others"
    if len(_tokens_beyond(request, other)) != 1:
        return "it must bring exactly one pending token"
    return ""


def _tokens_beyond(request: Request, other: RequestState) -> list[int]:
    """Output tokens that the state adds to the request's own."""
    beyond = other.committed_token_ids[len(request.tokens) :]
    if not beyond and other.pending_token_id >= 0:
        return [other.pending_token_id]
    return beyond
