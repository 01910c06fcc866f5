"""Drives a UCX worker from an asyncio loop: sleeps on its epoll descriptor, works in short turns."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

TURN_S = 0.002
"""Longest stretch of work before the loop's other tasks have their turn."""
TICK_S = 0.2
"""While something is outstanding, a turn at least this often, should a wake-up be missed."""


class Progress:
    """Progresses `worker` and completes the futures of its requests."""

    def __init__(self, worker: Any, collect: Callable[[], None], is_waiting: Callable[[], bool]) -> None:
        """`collect` is called in each turn to take arrived messages; `is_waiting` says whether any are waited for."""
        self._worker = worker
        self._collect = collect
        self._is_waiting = is_waiting
        self._requests: dict[int, tuple[Any, asyncio.Future[None], Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None
        worker.init_blocking_progress_mode()
        self._descriptor = worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self.poke)
        self.poke()

    @property
    def outstanding(self) -> int:
        return len(self._requests)

    def track(self, request: Any, buffer: Any) -> "asyncio.Future[None]":
        """A future that is done when the request is over, well or not; the buffer lives at least as long."""
        done: asyncio.Future[None] = self._loop.create_future()
        if request.completed:
            done.set_result(None)
        else:
            self._requests[id(request)] = (request, done, buffer)
            self.poke()
        return done

    def poke(self) -> None:
        """Asks for a turn soon."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self._work)

    def close(self) -> None:
        """Stops; what is still outstanding is cancelled."""
        self._loop.remove_reader(self._descriptor)
        for handle in (self._turn, self._tick):
            if handle is not None:
                handle.cancel()
        for _, done, _ in self._requests.values():
            done.cancel()
        self._requests.clear()
        del self._worker

    def run_turn(self) -> bool:
        """Progresses until UCX is idle or the turn is over; returns whether it is idle."""
        end = time.monotonic() + TURN_S
        idle = False
        while not idle and time.monotonic() < end:
            idle = not self._worker.progress_once()
        self._collect()
        for key, (request, done, _) in list(self._requests.items()):
            if request.completed:
                del self._requests[key]
                if not done.done():
                    done.set_result(None)
        return idle

    def _work(self) -> None:
        self._turn = None
        if not self.run_turn() or not self._worker.arm():
            self.poke()
        if self._tick is None and (self._requests or self._is_waiting()):
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self.poke()
