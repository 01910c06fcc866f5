"""Load or recompute: which source gives which block of a prompt, and how far loading is worth it. Pure."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

RATE_WEIGHT = 0.2
MIN_MEASURED_BYTES = 64 * 1024
MEASURE_LIFE_S = 30.0
LONG_RUN = 16
"""Blocks in a row with the same sources from which arrays are quicker than a loop."""

Flags = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offer:
    """What one source has of the wanted blocks."""

    name: str
    has: Sequence[bool]
    has_snapshot: Sequence[bool]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Leading blocks to load, by source; empty when computing them is quicker."""

    num_blocks: int = 0
    by_source: Mapping[str, list[int]] = field(default_factory=dict)
    load_s: float = 0.0
    compute_s: float = 0.0
    """Of the same blocks."""


def plan_load(
    offers: Sequence[Offer],
    num_blocks: int,
    *,
    first_block: int = 0,
    block_bytes: int,
    block_compute_s: float,
    need_snapshot: bool,
    always: bool = False,
) -> LoadPlan:
    """The run of blocks from `first_block` on whose loading saves most time; each from the source that has it there
    first, after its latency and the blocks that it already brings.

    Sources work at the same time; of equally quick ones the first in `offers` is taken. A model with sequence state can
    use a run only up to a block with a snapshot.
    `always`: as many blocks as there are, whatever is quicker.
    """
    has = np.array([offer.has[first_block:num_blocks] for offer in offers], bool)
    with_snapshot = np.array([offer.has_snapshot[first_block:num_blocks] for offer in offers], bool)
    if need_snapshot and offers:
        # Where somebody has the snapshot too, the block comes from nobody else: it is what the run can end with.
        has &= with_snapshot | ~np.logical_or.reduce(with_snapshot, axis=0)
    count = _leading(np.logical_or.reduce(has, axis=0)) if offers else 0
    if not count:
        return LoadPlan()
    chosen, arrival_s = _assign(
        has[:, :count],
        np.array([offer.latency_s for offer in offers]),
        np.array([block_bytes / offer.bytes_per_s for offer in offers]),
    )
    load_s = np.maximum.accumulate(arrival_s)
    saved_s = np.arange(1, count + 1, dtype=np.float64) * block_compute_s - load_s
    usable = np.ones(count, bool)
    if need_snapshot:
        usable = with_snapshot[chosen, np.arange(count)]
    best = _best(usable, saved_s, always=always)
    if not best:
        return LoadPlan()
    by_source = {
        offer.name: (np.flatnonzero(chosen[:best] == order) + first_block).tolist()
        for order, offer in enumerate(offers)
        if (chosen[:best] == order).any()
    }
    return LoadPlan(best, by_source, float(load_s[best - 1]), best * block_compute_s)


def _leading(flags: Flags) -> int:
    """How many flags from the first one on are set."""
    return len(flags) if flags.all() else int(flags.argmin())


def _best(usable: Flags, saved_s: Seconds, *, always: bool) -> int:
    """Length of the best run; 0: none is worth it."""
    ends = np.flatnonzero(usable)
    if not len(ends):
        return 0
    if always:
        return int(ends[-1]) + 1
    end = ends[saved_s[ends].argmax()]
    return int(end) + 1 if saved_s[end] > 0 else 0


def _assign(has: Flags, latency_s: Seconds, block_s: Seconds) -> tuple[npt.NDArray[np.intp], Seconds]:
    """The source of each block, and when it arrives; `has` is [sources, blocks], and each block has a source.

    Blocks are taken in order, each by who would have it there first. Where the same sources have many in a row, that is
    a merge of their arrivals; stores that share blocks by their hashes change at each block.
    """
    ready_s, each_s = latency_s.tolist(), block_s.tolist()
    chosen: list[int] = []
    arrival_s: list[float] = []
    codes = (1 << np.arange(len(has))) @ has
    holders = {code: [order for order in range(len(has)) if code >> order & 1] for code in set(codes.tolist())}
    borders = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
    for code, start, end in zip(codes[borders[:-1]].tolist(), borders, borders[1:], strict=False):
        orders = holders[code]
        if end - start < LONG_RUN:
            for _ in range(start, end):
                order = orders[0]
                for other in orders[1:]:
                    if ready_s[other] + each_s[other] < ready_s[order] + each_s[order]:
                        order = other
                ready_s[order] += each_s[order]
                chosen.append(order)
                arrival_s.append(ready_s[order])
            continue
        ahead = np.arange(1, end - start + 1)
        times = np.concatenate([ready_s[order] + ahead * each_s[order] for order in orders])
        first = times.argsort(kind="stable")[: len(ahead)]
        taken = np.take(orders, first // len(ahead))
        chosen += taken.tolist()
        arrival_s += times[first].tolist()
        for order, blocks in enumerate(np.bincount(taken).tolist()):
            ready_s[order] += blocks * each_s[order]
    return np.array(chosen), np.array(arrival_s)


class Rates:
    """Measured speed of each source, in bytes per second.

    A source that was measured as slow is not chosen, and so not measured again: after a while without a measure the
    default counts once more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes_per_s: dict[str, float] = {}
        self._measured_at: dict[str, float] = {}

    def bytes_per_s(self, name: str, default: float) -> float:
        """The measured rate, or the default where there is none or it is old."""
        age_s = self._clock() - self._measured_at.get(name, float("-inf"))
        return self._bytes_per_s[name] if age_s < MEASURE_LIFE_S else default

    def measured(self, name: str, size_bytes: int, seconds: float) -> None:
        """A fetch took so long, its latency aside."""
        if size_bytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        rate = size_bytes / seconds
        before = self.bytes_per_s(name, rate)
        self._bytes_per_s[name] = before + RATE_WEIGHT * (rate - before)
        self._measured_at[name] = self._clock()

    def late(self, name: str, size_bytes: int, seconds: float) -> None:
        """A fetch of so much was not done after so long: it takes twice that, for all that is known."""
        rate = max(1.0, size_bytes / (2 * max(seconds, 1e-3)))
        self._bytes_per_s[name] = min(rate, self.bytes_per_s(name, rate))
        self._measured_at[name] = self._clock()
