"""When a gateway counts as silent, and when it was the worker that stood still."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.gateway_stream import _next

PING = worker_pb2.ConnectRequest(ping=True)


def worker(liveness_s: float) -> Any:
    return SimpleNamespace(settings=SimpleNamespace(liveness_s=liveness_s))


async def messages(come: asyncio.Queue[worker_pb2.ConnectRequest]) -> AsyncIterator[worker_pb2.ConnectRequest]:
    while True:
        yield await come.get()


async def test_a_worker_that_stood_still_reads_what_came_before_it_calls_a_gateway_silent() -> None:
    come: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()
    waiting = asyncio.create_task(_next(worker(0.05), messages(come)))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.051, come.put_nowait, PING)
    # Both are due when the loop goes on: the end of the time first, then what came.
    time.sleep(0.2)  # noqa: ASYNC251
    assert await waiting == PING


async def test_a_gateway_that_says_nothing_is_silent() -> None:
    with pytest.raises(MeshError, match="fallen silent") as raised:
        await _next(worker(0.01), messages(asyncio.Queue()))
    assert (raised.value.code, raised.value.limit) == (errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "0.01 s")
