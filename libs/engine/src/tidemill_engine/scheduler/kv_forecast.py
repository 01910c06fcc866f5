"""Use of the pool if every running request emits what its class leads one to expect: its peak, and when room comes.

Requests end one after another; just before each end those still running have grown by as much as it has:

    blocks  |        __/|          the peak is at one of the ends
            |   __/|/   |__
            |__/   |_/|    |___
            +------------------- tokens from now
"""

import numpy as np

from tidemill_engine.request import Request
from tidemill_engine.scheduler.cover import admission_cover, growing, headroom_blocks, num_blocks
from tidemill_engine.scheduler.state import SchedulerState


def expected_left(state: SchedulerState, request: Request) -> float:
    """Output tokens that the request will yet emit; the admission headroom while its class is not known. None for a
    runaway: it gives way before others."""
    if request.is_runaway:
        return 0.0
    left = state.lengths.expected_left(request.output_class, request.num_output_tokens)
    if left is None:
        left = float(state.settings.admission_headroom_tokens)
    return min(left, float(request.max_len - len(request.tokens)))


def own_blocks(request: Request) -> int:
    """Blocks that nobody else is known to use, so that they are free when it ends."""
    return 0 if request.seq is None else max(0, len(request.seq.block_ids) - request.seq.num_cached_blocks)


def peak_blocks(state: SchedulerState, newcomer: Request) -> int:
    """The peak with the newcomer, whose prompt counts in full but for what is cached and in use by others."""
    size = state.settings.block_size
    grown = growing(state)
    own, left = [own_blocks(request) for request in grown], [expected_left(state, request) for request in grown]
    cached = newcomer.num_expected_tokens // size
    shared = max(0, state.cache.used_blocks - sum(own))
    own.append(max(1, num_blocks(len(newcomer.tokens), size) - cached))
    left.append(expected_left(state, newcomer))
    order = np.argsort(left)
    blocks_left = np.ceil(np.array(left)[order] / size)
    held = np.cumsum(np.array(own)[order][::-1])[::-1]
    alive = np.arange(len(left), 0, -1)
    return shared + int(np.max(held + alive * blocks_left))


def seconds_to_room(state: SchedulerState, newcomer: Request, low_blocks: int) -> float:
    """Predicted seconds until the newcomer fits beside those who run and use is at most `low_blocks`, if nobody gives
    way; 0: now; infinity: it never does. Nothing of its prompt counts as cached: that may be what leaves first."""
    size, cache = state.settings.block_size, state.cache
    grown = growing(state)
    left = np.array([_to_the_end(state, request) for request in grown])
    order = np.argsort(left)
    ended = np.cumsum([0, *np.array([own_blocks(request) for request in grown], np.int64)[order]])
    headroom = np.array([headroom_blocks(state, request) for request in grown], np.int64)[order]
    headroom_left = headroom.sum() - np.cumsum([0, *headroom])
    tokens = np.array([0.0, *left[order]])
    taken = np.arange(len(grown), -1, -1) * np.ceil(tokens / size)
    available = cache.available_blocks + ended - taken
    need = num_blocks(admission_cover(state, newcomer), size)
    fits = (available - headroom_left >= need) & (available >= cache.num_blocks - low_blocks)
    return float(tokens[np.argmax(fits)]) * state.token_s() if fits.any() else float("inf")


def _to_the_end(state: SchedulerState, request: Request) -> float:
    """As `expected_left`, but a runaway, or one of an unknown class, is taken to go on to its limit."""
    most = float(request.max_len - len(request.tokens))
    left = state.lengths.expected_left(request.output_class, request.num_output_tokens)
    return most if left is None or request.is_runaway else min(left, most)
