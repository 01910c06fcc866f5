"""A process's wish to end, and how long its running work may still take."""

import asyncio
import time
from collections.abc import Callable


class Drain:
    """requested: set once the process should take no new work."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = asyncio.Event()
        self._drain_s = drain_s
        self._clock = clock
        self._ends = 0.0

    def request(self) -> None:
        """Begins the drain; later calls change nothing."""
        if not self.requested.is_set():
            self._ends = self._clock() + self._drain_s
            self.requested.set()

    @property
    def deadline_s(self) -> float:
        """Seconds left for running work; the whole time before the drain is requested."""
        return max(0.0, self._ends - self._clock()) if self.requested.is_set() else self._drain_s
