"""Prompts that gateways reported computed, until the target's own load report knows it."""

from collections import deque
from collections.abc import Callable

from tidemill_kvcache.domain_track import Holder

KEPT_S = 5.0
"""A load report that is older is stale, and not worth correcting."""


class ComputedPrompts:
    """(when, tokens) by target, of the last seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_target: dict[Holder, deque[tuple[float, int]]] = {}

    def add(self, holder: Holder, tokens: int) -> None:
        """A prompt of so many uncached tokens is computed."""
        kept = self._by_target.setdefault(holder, deque())
        kept.append((self._clock(), tokens))
        while kept[0][0] < self._clock() - KEPT_S:
            kept.popleft()

    def tokens_since(self, holder: Holder, moment_s: float) -> int:
        """Tokens computed after a moment, which is lately: latest first, for a busy target has thousands."""
        total = 0
        for when, tokens in reversed(self._by_target.get(holder, ())):
            if when <= moment_s:
                break
            total += tokens
        return total

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        for holder in [h for h in self._by_target if h[0] == instance]:
            del self._by_target[holder]
