"""A request that grows into a full pool waits a moment for blocks that nobody has to lose.

Copies to other tiers, reads of peers, onboardings and hand-overs give blocks back by themselves, mostly within
milliseconds; who is preempted computes anew. Others go on meanwhile. The wait is as long as the recompute that it may
save, and never longer than `growth_wait_s`: so waiting in vain at most doubles the cost of preempting at once.
"""

from collections.abc import Iterator

from tidemill_engine.request import Phase, Request
from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.scheduler.state import SchedulerState
from tidemill_kvcache.sequence import CachedSequence


def waits_to_grow(state: SchedulerState, request: Request, needed_tokens: int, victim: Request, now_s: float) -> bool:
    """Whether the request stands still in this step rather than take the victim's blocks."""
    assert request.seq is not None
    since_s = now_s if request.outgrown_since_s < 0 else request.outgrown_since_s
    until_s = since_s + min(state.settings.growth_wait_s, state.recompute_s(victim))
    lacking = num_blocks(needed_tokens, state.settings.block_size) - len(request.seq.block_ids)
    if now_s >= until_s or not state.cache.comes_free(list(_leaving(state)), lacking):
        return False
    request.outgrown_since_s = since_s
    # Where nothing else runs, only this ends the wait.
    state.timers.at(until_s, lambda *_: None, request.key)
    return True


def _leaving(state: SchedulerState) -> Iterator[CachedSequence]:
    """What a transfer holds and gives back when it ends. (What is received stays: it is going to run.)"""
    yield from (reservation.seq for reservation in state.reservations.values())
    onboarding = (r for r in state.transferring.values() if r.phase is Phase.ONBOARDING)
    for request in (*state.held.values(), *onboarding):
        if request.seq is not None:
            yield request.seq
