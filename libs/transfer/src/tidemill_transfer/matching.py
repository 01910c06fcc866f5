"""Pairs arriving messages with those who wait for them; either may come first. Pure, bounded, with injected time.

A message that nobody waits for is kept for a while, since its receiver may still ask for it. A tag is spent once its
message was received or given up: what comes later under it (late, or sent again over a new link) is dropped at once.
Both memories are bounded.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill_transfer.errors import TransferError

M = TypeVar("M")
W = TypeVar("W")

Key = tuple[str, int]
"""(incarnation of the sender, tag)"""

MAX_UNCLAIMED = 4096
MAX_UNCLAIMED_BYTES = 64 << 20
UNCLAIMED_AGE_S = 30.0
"""As long as a message may take (the engine's transfer_limit_s): whoever would have received it has given up."""
MAX_SPENT = 16384


@dataclass(frozen=True)
class Kept(Generic[M]):
    """The message waits for its receiver; `evicted` ones had to make room and are to be dropped."""

    evicted: list[M]


@dataclass(frozen=True)
class Dropped:
    """Nobody wants the message any more."""


class Mailbox(Generic[M, W]):
    """Waiters and unclaimed messages of all peers."""

    def __init__(self, max_unclaimed: int = MAX_UNCLAIMED, max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES) -> None:
        self.unclaimed_bytes = 0
        self._max_unclaimed = max_unclaimed
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._waiters: dict[Key, W] = {}
        self._unclaimed: OrderedDict[Key, tuple[float, int, M]] = OrderedDict()
        self._spent: OrderedDict[Key, None] = OrderedDict()

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def expect(self, key: Key, waiter: W) -> M | None:
        """Claims the message if it is here, else registers the waiter; TransferError when another one is there."""
        if key in self._unclaimed:
            self._spend(key)
            return self._take_unclaimed(key)
        if key in self._waiters:
            raise TransferError("unavailable", f"another receive waits for tag {key[1]} of that peer")
        self._spent.pop(key, None)
        self._waiters[key] = waiter
        return None

    def give_up(self, key: Key) -> None:
        """The waiter leaves; a message that comes later is dropped."""
        if self._waiters.pop(key, None) is not None:
            self._spend(key)

    def _spend(self, key: Key) -> None:
        self._spent[key] = None
        while len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)

    def arrive(self, key: Key, message: M, held_bytes: int, now: float) -> W | Kept[M] | Dropped:
        """Says who gets the message; a waiter returned is forgotten here."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            self._spend(key)
            return waiter
        if key in self._spent:
            return Dropped()
        # Sent again over a new link: the older one may never be complete.
        replaced = [self._take_unclaimed(key)] if key in self._unclaimed else []
        self._unclaimed[key] = (now, held_bytes, message)
        self.unclaimed_bytes += held_bytes
        return Kept(replaced + self.evict(now))

    def _take_unclaimed(self, key: Key) -> M:
        _, held_bytes, message = self._unclaimed.pop(key)
        self.unclaimed_bytes -= held_bytes
        return message

    @property
    def evict_at(self) -> float | None:
        """When the oldest unclaimed message will be too old."""
        return next((since + UNCLAIMED_AGE_S for since, _, _ in self._unclaimed.values()), None)

    def evict(self, now: float) -> list[M]:
        """Takes out what is too old or beyond the bounds, to be dropped."""
        evicted = []
        while self._unclaimed:
            key, (since, _, _) = next(iter(self._unclaimed.items()))
            fits = len(self._unclaimed) <= self._max_unclaimed and self.unclaimed_bytes <= self._max_unclaimed_bytes
            if fits and now - since < UNCLAIMED_AGE_S:
                break
            evicted.append(self._take_unclaimed(key))
        return evicted

    def withdraw(self, key: Key) -> tuple[M | None, W | None]:
        """The sender takes a message back: returns it, to be dropped, or who waits for it, to be failed."""
        if key in self._unclaimed:
            return self._take_unclaimed(key), None
        self._spend(key)
        return None, self._waiters.pop(key, None)

    def drop_peer(self, incarnation: str) -> tuple[list[W], list[M]]:
        """The peer is lost: returns its waiters (to be failed) and its unclaimed messages (to be dropped)."""
        waiters = [self._waiters.pop(key) for key in [k for k in self._waiters if k[0] == incarnation]]
        messages = [self._take_unclaimed(key) for key in [k for k in self._unclaimed if k[0] == incarnation]]
        for key in [k for k in self._spent if k[0] == incarnation]:
            del self._spent[key]
        return waiters, messages
