"""A handler written as an async generator, as gRPC's own server takes it, on a stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from google.protobuf.message import Message
from grpc.aio import AioRpcError

from tidemill_mesh.errors import GRPC_STATUS, STATUS_DETAILS_KEY, MeshError, to_status
from tidemill_mesh.interceptor import mesh_error_of
from tidemill_mesh.streams.server import Handler, ServerStream
from tidemill_mesh.streams.status import call_error

Request = TypeVar("Request", bound=Message)


def async_handler(
    method: str,
    behaviour: Callable[[AsyncIterator[Request]], AsyncGenerator[Message, None]],
    request_type: type[Request],
) -> Handler:
    """Runs `behaviour` in a task for each call; what it raises becomes the call's status."""

    def handle(stream: ServerStream) -> None:
        requests: _Requests[Request] = _Requests()
        stream.on_message = lambda data: requests.put(request_type.FromString(data))
        stream.on_client_done = requests.close
        task = asyncio.get_running_loop().create_task(_answer(method, stream, behaviour(requests)), name=method)
        stream.on_end = lambda error: task.cancel() if error is not None else None

    return handle


async def _answer(method: str, stream: ServerStream, responses: AsyncGenerator[Message, None]) -> None:
    writable = asyncio.Event()
    stream.on_writable = writable.set
    failure: MeshError | None = None
    try:
        async for response in responses:
            stream.send(response.SerializeToString())
            while not (stream.writable or stream.ended):
                writable.clear()
                await writable.wait()
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            # The call has ended: there is nobody left to answer.
            raise
        failure = mesh_error_of(method, error)
    finally:
        await responses.aclose()
        stream.finish(None if failure is None else error_status(failure))


def error_status(failure: MeshError) -> AioRpcError:
    """The status, with its details, that tells a caller of a failure."""
    status = to_status(failure)
    trailers = [(STATUS_DETAILS_KEY, status.SerializeToString())]
    return call_error(GRPC_STATUS[failure.code], status.message, trailers)


class _Requests(AsyncIterator[Request]):
    """Messages in order, until the client has said all."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    def put(self, request: Request) -> None:
        """A message has come."""
        self._waiting.append(request)
        self._notify()

    def close(self) -> None:
        """No more will come."""
        self._closed = True
        self._notify()

    async def __anext__(self) -> Request:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._waiting.popleft()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
