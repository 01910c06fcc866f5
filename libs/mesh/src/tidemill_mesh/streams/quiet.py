"""Watches a connection for silence: a ping after a while, its end when no answer comes for as long again."""

import asyncio
from collections.abc import Callable


class Quiet:
    """Times only what this process itself could have heard: one that was paused reads before it judges."""

    def __init__(self, silence_s: float, ping: Callable[[], None], silent: Callable[[], None]) -> None:
        self._silence_s = silence_s
        self._ping = ping
        self._silent = silent
        self._heard_at = 0.0
        self._looks = 0
        """Since something was last heard, beyond the first silence."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """The connection is open."""
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._look_in(self._silence_s)

    def stop(self) -> None:
        """It is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop = None

    def heard(self) -> None:
        """Something came."""
        if self._loop is not None:
            self._heard_at = self._loop.time()
            self._looks = 0

    def _look_in(self, delay_s: float) -> None:
        if self._loop is not None:
            self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        if self._loop is None:
            return
        left_s = self._heard_at + self._silence_s - self._loop.time()
        if left_s > 0.0:
            self._look_in(left_s)
            return
        self._looks += 1
        if self._looks == 1:
            self._ping()
            self._look_in(self._silence_s)
        elif self._looks == 2:
            # What waits in the socket is read before this fires.
            self._look_in(self._silence_s / 8)
        else:
            self._silent()
