"""A bound on the memory of what is in flight; whoever does not fit waits in line, within its deadline."""

import asyncio
from collections import deque
from typing import Any


class BudgetFull(Exception):
    """The line is full."""


class Hold:
    """Bytes of the budget, until `release` or the end of its `with` block."""

    def __init__(self, budget: "ByteBudget", size_bytes: int) -> None:
        self._budget = budget
        self._size_bytes = size_bytes
        self._user: asyncio.Future[Any] | None = None

    def keep_until(self, user: "asyncio.Future[Any]") -> None:
        """Gives nothing back before `user` (a thread that cannot be stopped) has ended."""
        self._user = user

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the bytes back; once."""
        if self._user is not None and not self._user.done():
            self._user.add_done_callback(lambda _: self._budget.give_back(self._size_bytes))
        else:
            self._budget.give_back(self._size_bytes)


class ByteBudget:
    """Hands out bytes in order of asking."""

    def __init__(self, limit_bytes: int, max_waiting: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, size_bytes: int, timeout_s: float) -> Hold:
        """Holds bytes; BudgetFull when too many wait already, TimeoutError when it takes too long."""
        assert size_bytes <= self.limit_bytes, "callers refuse what can never fit"
        if not self._waiting and self.used_bytes + size_bytes <= self.limit_bytes:
            self.used_bytes += size_bytes
            return Hold(self, size_bytes)
        if len(self._waiting) >= self._max_waiting:
            raise BudgetFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size_bytes, turn)
        self._waiting.append(place)
        try:
            await asyncio.wait([turn], timeout=timeout_s)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(size_bytes)
            else:
                self._leave(place)
            raise
        if not turn.done():
            self._leave(place)
            raise TimeoutError("no memory in time")
        return Hold(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Returns bytes and lets those in after whom they fit."""
        self.used_bytes -= size_bytes
        self._admit()

    def _leave(self, place: "tuple[int, asyncio.Future[None]]") -> None:
        self._waiting.remove(place)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.limit_bytes:
            size_bytes, turn = self._waiting.popleft()
            self.used_bytes += size_bytes
            turn.set_result(None)
