"""When a failed cache domain is started again: exponential back-off, and a bound on restarts in a window."""

from collections import deque
from collections.abc import Callable


class RestartPolicy:
    """Gives the delay before the next start, or None when the domain failed too often."""

    def __init__(
        self, *, limit: int, window_s: float, backoff_s: float, max_backoff_s: float, clock: Callable[[], float]
    ) -> None:
        self._limit = limit
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._failures: deque[float] = deque()

    def failed(self) -> float | None:
        """Records a failure now; returns seconds to wait before the restart."""
        now = self._clock()
        self._failures.append(now)
        while self._failures and now - self._failures[0] > self._window_s:
            self._failures.popleft()
        if len(self._failures) > self._limit:
            return None
        return min(self._max_backoff_s, self._backoff_s * 2.0 ** (len(self._failures) - 1))
