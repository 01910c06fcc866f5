"""How long outputs get: what has ended tells how much a running request will yet emit, and which length is unusual.

Of a request that has emitted `n` tokens, only past outputs longer than `n` say anything. One that has outrun them all
is taken to emit as much again.

A high quantile is hardly known from few outputs: of 20, the longest may lie below or far above the length that 99 %
stay below. What can be said, for any distribution, is between which of them it lies; within these bounds a log-normal
fit decides, so one outlier neither counts for nothing nor decides alone.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_KEPT = 512
"""Past outputs of each class."""
_MOST_CLASSES = 64
_ENOUGH = 20
"""Past outputs from which on a class is judged by its own."""
_CONFIDENCE = 0.95
"""Of each bound of a quantile."""


class _Lengths:
    def __init__(self) -> None:
        self._kept: deque[int] = deque(maxlen=_KEPT)
        self._sorted: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, length: int) -> None:
        self._kept.append(length)
        self._sorted = None

    def sorted(self) -> npt.NDArray[np.int64]:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._kept, dtype=np.int64))
        return self._sorted


class OutputLengths:
    """Lengths of finished outputs by class, and of all together."""

    def __init__(self) -> None:
        self._all = _Lengths()
        self._classes: OrderedDict[Hashable, _Lengths] = OrderedDict()

    def add(self, name: Hashable, length: int) -> None:
        """An output of the class ended by itself or at its limit."""
        self._all.add(length)
        self._classes.setdefault(name, _Lengths()).add(length)
        self._classes.move_to_end(name)
        if len(self._classes) > _MOST_CLASSES:
            self._classes.popitem(last=False)

    def expected_left(self, name: Hashable, emitted: int) -> float | None:
        """Mean tokens that one which has emitted so many has left; None while too little is known."""
        lengths = self._of(name)
        if lengths is None:
            return None
        ordered = lengths.sorted()
        longer = ordered[np.searchsorted(ordered, emitted, side="right") :]
        return float(longer.mean()) - emitted if len(longer) else float(max(1, emitted))

    def upper(self, name: Hashable, quantile: float) -> float | None:
        """The length that such a share of the class's outputs stays below; None while too little is known."""
        lengths = self._of(name)
        return None if lengths is None else upper_bound(lengths.sorted(), quantile)

    def _of(self, name: Hashable) -> _Lengths | None:
        own = self._classes.get(name)
        if own is not None and len(own) >= _ENOUGH:
            return own
        return self._all if len(self._all) >= _ENOUGH else None


def upper_bound(ordered: npt.NDArray[np.int64], quantile: float) -> float:
    """The quantile of what two or more lengths, in ascending order, are a sample of."""
    logs = np.log(np.maximum(ordered, 1))
    low, high = _ranks(len(ordered), quantile)
    fitted = float(np.exp(logs.mean() + _spreads(len(ordered), quantile) * logs.std(ddof=1)))
    return min(max(fitted, float(ordered[low])), float(ordered[high]))


@lru_cache(maxsize=2 * _KEPT)
def _ranks(count: int, quantile: float) -> tuple[int, int]:
    """Indices of sorted outputs that lie below and above the quantile with confidence; the last one where even that
    may lie below. How many of them are beyond the quantile is binomial."""
    below = above = 1
    exactly = quantile**count
    at_least = 1.0 - exactly
    for beyond in range(1, count + 1):
        # at_least: the chance that so many or more are beyond the quantile, so that the one of this rank is.
        below = beyond
        if at_least >= _CONFIDENCE:
            above = beyond
        if at_least <= 1.0 - _CONFIDENCE:
            break
        exactly *= (count - beyond + 1) / beyond * (1.0 - quantile) / quantile
        at_least -= exactly
    return count - below, count - above


def _spreads(count: int, quantile: float) -> float:
    """Standard deviations above the mean at which the quantile of a normal variable is predicted from a sample:
    Student's t (its first correction to the normal quantile), and the mean's own error."""
    normal = NormalDist().inv_cdf(quantile)
    student = normal + (normal**3 + normal) / (4 * (count - 1))
    return float(student * (1.0 + 1.0 / count) ** 0.5)
