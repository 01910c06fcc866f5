"""Tasks that outlive a call: none ends unseen, and each is ended by who started it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task whose unexpected end is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancels a task and waits for it; None is allowed."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def wait_up_to(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event; False when the time is over first."""
    # Not asyncio.wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        # It may have come after the time was over and before this task ran: a caller that clears it would lose it.
        return event.is_set()
    return True


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("task ended by an error", task=task.get_name(), exc_info=task.exception())
