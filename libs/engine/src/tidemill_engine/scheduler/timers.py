"""Deadlines of whatever is held, so that each fires on time in an idle engine too."""

import heapq
from collections.abc import Callable, Hashable
from typing import NamedTuple


class _Timer(NamedTuple):
    when_s: float
    number: int
    action: Callable[[Hashable, float], None]
    subject: Hashable


class Timers:
    """Timers are never cancelled: an action finds out whether its subject still waits, and may set a new one."""

    def __init__(self) -> None:
        self._heap: list[_Timer] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[Hashable, float], None], subject: Hashable) -> None:
        """Calls action(subject, now_s) at the first `run_due` at or after `when_s`."""
        self._count += 1
        heapq.heappush(self._heap, _Timer(when_s, self._count, action, subject))

    def run_due(self, now_s: float) -> None:
        """Fires what is due."""
        while self._heap and self._heap[0].when_s <= now_s:
            timer = heapq.heappop(self._heap)
            timer.action(timer.subject, now_s)

    @property
    def next_due_s(self) -> float:
        """Time of the next timer; infinity when there is none."""
        return self._heap[0].when_s if self._heap else float("inf")
