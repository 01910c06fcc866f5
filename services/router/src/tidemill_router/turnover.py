"""How fast each target's cache turns over: what it computes displaces what it holds, and is worth something there."""

import math
from collections.abc import Callable, Sequence

from tidemill_kvcache.domain_track import Holder

SLACK = 0.1
"""Inflow, as a share of the pool, below which differences between targets hardly count."""


class Turnover:
    """Prompt tokens that each target was lately given to compute, halved with every `half_life_s`."""

    def __init__(self, half_life_s: float, clock: Callable[[], float]) -> None:
        self._half_life_s = half_life_s
        self._clock = clock
        self._tokens: dict[Holder, tuple[float, float]] = {}
        """(tokens, when they were right)."""

    def add(self, holder: Holder, tokens: int) -> None:
        """The target has so many more to compute."""
        self._tokens[holder] = (self.recent_tokens(holder) + tokens, self._clock())

    def recent_tokens(self, holder: Holder) -> float:
        """As of now."""
        tokens, since_s = self._tokens.get(holder, (0.0, 0.0))
        return tokens * math.pow(0.5, (self._clock() - since_s) / self._half_life_s) if tokens else 0.0

    def forget(self, instance: str) -> None:
        """The instance is gone, and its cache with it."""
        for holder in [h for h in self._tokens if h[0] == instance]:
            del self._tokens[holder]


def pressures(inflows: Sequence[float]) -> list[float]:
    """Of each target, 1 where its inflow (a share of its pool) is the mean of all; about 1 while all are small."""
    mean = sum(inflows) / len(inflows)
    return [(inflow + SLACK) / (mean + SLACK) for inflow in inflows]
