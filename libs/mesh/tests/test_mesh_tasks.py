"""Waiting with a limit, at its edge."""

import asyncio
import time

from tidemill_mesh.tasks import wait_up_to


async def test_an_event_that_comes_right_after_the_time_was_over_is_told_of() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_up_to(event, 0.01))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.011, event.set)
    # Both timers are due when the loop goes on: the limit's first, then the event's, and only then the task.
    time.sleep(0.05)  # noqa: ASYNC251
    assert await waiting


async def test_an_event_that_does_not_come_is_not_told_of() -> None:
    assert not await wait_up_to(asyncio.Event(), 0.0)
