"""Which waiting requests get blocks and a row, in order of rank, with bounded overtaking."""

import enum

from tidemill_engine.messages import BlocksHit
from tidemill_engine.request import Request
from tidemill_engine.scheduler import cover
from tidemill_engine.scheduler.chunks import chunk_tokens, min_chunk
from tidemill_engine.scheduler.decode_guard import is_paused, may_grow
from tidemill_engine.scheduler.lifecycle import begin_running, extend_chain, look_up, mark_stalled
from tidemill_engine.scheduler.plan import StepPlan
from tidemill_engine.scheduler.prefilled import report_progress
from tidemill_engine.scheduler.state import SchedulerState
from tidemill_engine.scheduler.transfers import ask_hand_over, ask_onboard, wants_onboard
from tidemill_kvcache.sequence import MatchResult

_MAX_BLOCKED = 4
"""Requests that found no room after which a step looks no further."""


class Verdict(enum.Enum):
    """What became of an attempt to admit a request."""

    ADMITTED = "admitted"
    NO_ROOM = "no_room"
    LATER = "later"
    """It waits for something other than room: credit, budget or another request's prefix."""


class Growth:
    """Blocks that admitted requests are going to take. Nothing but admissions changes them while a step is planned, so
    they are counted once for each step, not for each request."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._blocks: int | None = None

    @property
    def blocks(self) -> int:
        """See `cover.growth_blocks`."""
        if self._blocks is None:
            self._blocks = cover.growth_blocks(self._state)
        return self._blocks

    def add(self, request: Request) -> None:
        """The request was admitted."""
        assert self._blocks is not None, "an admission asks first"
        if cover.is_growing(request):
            self._blocks += cover.headroom_blocks(self._state, request)


class Admission:
    """One step's admissions. A request that does not fit may be passed `max_overtakes` times, then nobody passes it."""

    def __init__(self, state: SchedulerState, plan: StepPlan, now_s: float) -> None:
        self._state = state
        self._plan = plan
        self._now_s = now_s
        self._blocked: list[Request] = []
        self._closed = False
        self._growth = Growth(state)

    def consider(self, request: Request) -> None:
        """Admits the waiting request if it may and can be; most urgent first."""
        state = self._state
        if self._closed or state.num_active >= state.settings.max_num_seqs or is_paused(state, request):
            return
        verdict = _try_admit(state, self._plan, self._growth, request, self._now_s)
        if verdict is Verdict.NO_ROOM:
            self._blocked.append(request)
        elif verdict is Verdict.ADMITTED:
            self._growth.add(request)
            for passed in self._blocked:
                passed.num_overtaken += 1
        passed_enough = any(passed.num_overtaken >= state.settings.max_overtakes for passed in self._blocked)
        self._closed = passed_enough or len(self._blocked) >= _MAX_BLOCKED


def _try_admit(state: SchedulerState, plan: StepPlan, growth: Growth, request: Request, now_s: float) -> Verdict:
    if request.stage == "decode":
        return _admit_hand_over(state, growth, request)
    if request.credit_tokens <= 0:
        mark_stalled(state, request, now_s)
        return Verdict.LATER
    has_budget = _has_budget(state, plan, request)
    if not has_budget and (request.asked_onboard or not state.settings.onboard_enabled):
        return Verdict.LATER
    if _follows(state, request, now_s):
        return Verdict.LATER
    if not may_grow(state, request):
        return Verdict.NO_ROOM
    match = _take_blocks(state, growth, request, need_snapshot=True)
    if match is None:
        return Verdict.NO_ROOM
    if wants_onboard(state, request, match):
        ask_onboard(state, request, match, now_s)
        return Verdict.ADMITTED
    if not has_budget:
        _give_blocks_back(state, request)
        return Verdict.LATER
    _start(state, request, match, now_s)
    _plan_first_chunk(state, plan, request)
    return Verdict.ADMITTED


def _admit_hand_over(state: SchedulerState, growth: Growth, request: Request) -> Verdict:
    if not may_grow(state, request):
        return Verdict.NO_ROOM
    match = _take_blocks(state, growth, request, need_snapshot=False)
    if match is None:
        return Verdict.NO_ROOM
    ask_hand_over(state, request, match)
    return Verdict.ADMITTED


def _has_budget(state: SchedulerState, plan: StepPlan, request: Request) -> bool:
    """There are tokens left for a chunk worth having, and the prompt ends with it or may be computed in part."""
    left, wanted = plan.tokens_left, request.num_uncached_tokens
    if left < min(wanted, min_chunk(state.settings)) and not (plan.is_empty and left > 0):
        return False
    return wanted <= left or _may_be_partial(state, plan, request)


def _may_be_partial(state: SchedulerState, plan: StepPlan, request: Request) -> bool:
    """Prompts computed in part are bounded in number and in blocks; one alone may always be. Each holds blocks for all
    of its prompt, so it never waits for another one's."""
    partial = [r for r in state.running if r.num_remaining_tokens > max(1, plan.chunks.get(r, 0))]
    if not partial:
        return True
    blocks = sum(len(r.seq.block_ids) for r in partial if r.seq is not None)
    blocks += cover.num_blocks(len(request.tokens), state.settings.block_size)
    within_kv = blocks <= state.settings.partial_kv_share * state.cache.num_blocks
    return within_kv and len(partial) < state.settings.max_partial_prefills


def _follows(state: SchedulerState, request: Request, now_s: float) -> bool:
    """Whether another request is computing the block that this one lacks first."""
    limit_s = state.settings.dedupe_wait_s
    if request.following_since_s >= 0 and now_s - request.following_since_s >= limit_s:
        return False
    usable = (len(request.tokens) - 1) // state.settings.block_size
    depth = look_up(state, request)
    if depth >= usable or state.in_flight.owner(request.hash_chain[depth]) in (None, request):
        return False
    if request.following_since_s < 0:
        request.following_since_s = now_s
        state.timers.at(now_s + limit_s, lambda *_: None, request.key)
    return True


def _take_blocks(state: SchedulerState, growth: Growth, request: Request, *, need_snapshot: bool) -> MatchResult | None:
    """Matches the cache and allocates the rest; None, and nothing taken, when the request's need does not fit."""
    if state.has_sequence_state and state.slots.num_free == 0:
        return None
    cache, block_size = state.cache, state.settings.block_size
    seq = cache.open(request.chain_root, request.priority)
    seq.hash_chain = request.hash_chain
    # KV from prefill covers all known tokens; otherwise the last one is computed for its logits.
    limit = len(request.tokens) - (0 if request.stage == "decode" else 1)
    match = cache.match_prefix(seq, request.tokens.view(), limit, need_snapshot=need_snapshot)
    need = cover.num_blocks(cover.admission_cover(state, request), block_size) - match.num_blocks
    if need + growth.blocks > cache.available_blocks:
        cache.free(seq)
        return None
    granted = cache.allocate(seq, cover.initial_cover(state, request))
    assert granted is not None, "less than what was just found available"
    request.seq = seq
    if state.has_sequence_state:
        request.sequence_slot = state.slots.take()
    return match


def _give_blocks_back(state: SchedulerState, request: Request) -> None:
    assert request.seq is not None
    state.cache.free(request.seq)
    request.seq = None
    if request.sequence_slot >= 0:
        state.slots.give_back(request.sequence_slot)
        request.sequence_slot = -1


def _start(state: SchedulerState, request: Request, match: MatchResult, now_s: float) -> None:
    """The request has blocks and gets a row."""
    state.waiting.remove(request)
    request.num_computed_tokens = match.num_tokens
    request.num_expected_tokens = 0
    request.restore_snapshot_id = match.snapshot_id
    if request.scheduled_s < 0:
        found = min(match.num_tokens, request.prompt_tokens - 1)
        request.num_cached_l1 = min(found, request.local_tokens) if request.onboarded else found
        beyond = found - request.num_cached_l1
        request.num_cached_l2 = min(beyond, request.onboarded_l2_tokens)
        request.num_cached_l3 = beyond - request.num_cached_l2
        state.load.prompt_tokens_total += request.prompt_tokens
        state.load.cached_tokens_total += found
    begin_running(state, request, now_s)
    chain = extend_chain(state, request)
    state.in_flight.register(request, match.num_blocks, chain[match.num_blocks :])
    if state.settings.report_hits and match.num_blocks:
        state.notices.append(BlocksHit(chain[: match.num_blocks]))
    if request.stage == "prefill":
        # Before the first chunk, so that decode can be placed while it is computed.
        report_progress(state, request, final=False)


def _plan_first_chunk(state: SchedulerState, plan: StepPlan, request: Request) -> None:
    interval = state.limits.snapshot_interval_tokens
    chunk = chunk_tokens(request.num_computed_tokens, len(request.tokens), plan.tokens_left, interval)
    if chunk:
        plan.chunks[request] = chunk
