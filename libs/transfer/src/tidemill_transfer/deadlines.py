"""Deadlines of operations, and ending an operation properly although its caller is cancelled."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

WITHDRAW_S = 0.25
"""How long a peer may take to let go of an operation that is given up, before the link is taken down."""
CLOSE_S = 5.0
"""Longest wait for requests to end after their endpoint was closed; they end within milliseconds."""


@dataclass(frozen=True)
class Deadline:
    """A point of the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline of an operation that may take so long, the time to give it up included."""
        return cls(time.monotonic() + seconds - min(WITHDRAW_S, seconds / 4))

    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())


async def despite_cancel(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, also when the caller is cancelled meanwhile (which the caller then re-raises)."""
    task = asyncio.create_task(work, name="transfer-end")
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
    task.result()
