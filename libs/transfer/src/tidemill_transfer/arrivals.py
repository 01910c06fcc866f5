"""Waits for arriving messages on the event loop; the decisions are matching.Mailbox's."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from tidemill_transfer.deadlines import Deadline
from tidemill_transfer.errors import TransferError
from tidemill_transfer.matching import Dropped, Kept, Key, Mailbox

M = TypeVar("M")


class Arrivals(Generic[M]):
    """Messages of all peers that have come, and those who wait for them."""

    def __init__(self, drop: Callable[[M], None], counters: Counter[str]) -> None:
        """`drop` releases a message that nobody wants."""
        self._drop = drop
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._mailbox: Mailbox[M, asyncio.Future[M]] = Mailbox()
        self._eviction: asyncio.TimerHandle | None = None

    @property
    def num_unclaimed(self) -> int:
        return self._mailbox.num_unclaimed

    @property
    def num_waiting(self) -> int:
        return self._mailbox.num_waiting

    async def take(self, key: Key, deadline: Deadline) -> M:
        """The message of this key; TransferError when it does not come in time or its sender is lost."""
        waiter: asyncio.Future[M] = self._loop.create_future()
        here = self._mailbox.expect(key, waiter)
        if here is not None:
            return here
        try:
            await asyncio.wait([waiter], timeout=deadline.left_s())
        except asyncio.CancelledError:
            self._leave(key, waiter)
            raise
        if not waiter.done():
            self._leave(key, waiter)
            raise TransferError("deadline", "the message has not come in time")
        return waiter.result()

    def _leave(self, key: Key, waiter: "asyncio.Future[M]") -> None:
        if not waiter.done():
            waiter.cancel()
            self._mailbox.give_up(key)
        elif waiter.exception() is None:
            self._drop(waiter.result())

    def arrived(self, key: Key, message: M, held_bytes: int = 0) -> None:
        """Hands the message to who waits for it, keeps it (which takes so much memory here), or drops it."""
        taker = self._mailbox.arrive(key, message, held_bytes, self._loop.time())
        if isinstance(taker, Dropped):
            self._drop(message)
        elif isinstance(taker, Kept):
            self._evict(taker.evicted)
        else:
            taker.set_result(message)

    def close(self) -> None:
        """Ends the watch over what is too old."""
        if self._eviction is not None:
            self._eviction.cancel()

    def _evict(self, evicted: list[M]) -> None:
        for message in evicted:
            self._counters["evicted_messages"] += 1
            self._drop(message)
        evict_at = self._mailbox.evict_at
        if self._eviction is None and evict_at is not None:
            self._eviction = self._loop.call_at(evict_at, self._evict_old)

    def _evict_old(self) -> None:
        # Also without another arrival: a quiet agent must not hold what its peers left there.
        self._eviction = None
        self._evict(self._mailbox.evict(self._loop.time()))

    def withdrawn(self, key: Key) -> None:
        """The sender has taken the message back."""
        message, waiter = self._mailbox.withdraw(key)
        if message is not None:
            self._drop(message)
        if waiter is not None:
            waiter.set_exception(TransferError("peer_lost", "the sender has taken the message back"))

    def peer_lost(self, incarnation: str, reason: str) -> None:
        """Fails who waits for that run and drops what it left."""
        waiters, messages = self._mailbox.drop_peer(incarnation)
        for waiter in waiters:
            waiter.set_exception(TransferError("peer_lost", reason))
        for message in messages:
            self._drop(message)
