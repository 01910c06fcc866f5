"""Simulated time: a queue of actions; equal times keep the order in which they were planned."""

import heapq
from collections.abc import Callable


class SimulatedClock:
    """Seconds since the start; calling it gives the present."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Plans an action; one for the past happens now."""
        self._count += 1
        heapq.heappush(self._planned, (max(when_s, self.now_s), self._count, action))

    def run(self, until: Callable[[], bool]) -> None:
        """Carries out what is planned until `until` says so, or nothing is left."""
        while self._planned and not until():
            self.now_s, _, action = heapq.heappop(self._planned)
            action()
