"""gRPC requests count as HTTP bodies do: while they are read, and until they are accepted.

gRPC hands over whole messages and says nothing of one that is still coming, but once a read has begun the sender may
send all of it. So a message that has not arrived after SLOW_S counts as the largest one, and all such messages together
have half of the room: the other half is for those that come at once. Room is for callers with a key; what else is
served, health above all, takes none: its messages are small and come at once, or are refused. To see a read at all, a
method that takes one message is served as one that takes a stream, which is the same on the wire.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import grpc

from tidemill.v1 import errors_pb2
from tidemill_gateway.auth import Keys
from tidemill_gateway.bodies import Bodies, too_large
from tidemill_mesh.channels import MAX_MESSAGE_BYTES
from tidemill_mesh.errors import MeshError
from tidemill_mesh.interceptor import Context, parse_request

SLOW_S = 5.0
SLOW_SHARE = 0.5
SMALL_MESSAGE_BYTES = 64 << 10
"""Of a method that asks for no key."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Reading: TypeAlias = "asyncio.Future[Any]"


class Message:
    """The room that one call's message takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    def take(self, num_bytes: int) -> None:
        """Counts so many bytes in place of those before; RESOURCE_EXHAUSTED without room."""
        self.drop()
        if not self._bodies.take(num_bytes):
            raise self._bodies.no_room()
        self._held = num_bytes

    def drop(self) -> None:
        """Gives the room back; on every way out, as often as wanted."""
        self._bodies.give(self._held)
        self._held = 0


_message: ContextVar[Message] = ContextVar("message of this call")
_tenant: ContextVar[str] = ContextVar("tenant of this call")


def caller() -> str:
    """The tenant of the running call: its key was asked for before its message was read, and only then."""
    return _tenant.get()


def accepted() -> None:
    """The request of the running call is accepted: it counts no more."""
    message = _message.get(None)
    if message is not None:
        message.drop()


def metadata_of(context: Context) -> dict[str, str]:
    """The texts among what the caller sent beside its message."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


class BoundedReads(grpc.aio.ServerInterceptor):
    """Reads the one message of a call within the bounds; methods of `service` are for callers with a key."""

    def __init__(
        self, bodies: Bodies, keys: Keys, service: str, receive_timeout_s: float, slow_s: float = SLOW_S
    ) -> None:
        self._bodies = bodies
        self._keys = keys
        self._service = service
        self._timeout_s = receive_timeout_s
        self._slow_s = min(slow_s, receive_timeout_s)
        self._slow_bytes = min(MAX_MESSAGE_BYTES, int(bodies.limit_bytes * SLOW_SHARE))
        self._most_slow = max(1, int(bodies.limit_bytes * SLOW_SHARE) // MAX_MESSAGE_BYTES)
        self._slow = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The handler of the called method, which now reads by itself."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = partial(parse_request, handler.request_deserializer)

        async def keyed(_: Any, context: Context) -> Any:
            # The context is this call's own, and ends with it.
            _tenant.set(self._keys.tenant(metadata_of(context).get("authorization", "")))
            message = Message(self._bodies)
            token = _message.set(message)
            try:
                # No name for the request here: it would live as long as the answer, and counts until it is accepted.
                return await behaviour(parse(await self._read(context, message)), context)
            finally:
                _message.reset(token)
                message.drop()

        async def open_to_all(_: Any, context: Context) -> Any:
            return await behaviour(parse(await self._read_small(context)), context)

        call = keyed if handler_call_details.method.startswith(f"/{self._service}/") else open_to_all
        streaming = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler
        return make(call, None, handler.response_serializer)  # type: ignore[arg-type, return-value]

    async def _read(self, context: Context, message: Message) -> bytes:
        data = await self._read_at_once(context, lambda reading: self._read_slowly(reading, message))
        message.take(len(data))
        return data

    async def _read_small(self, context: Context) -> bytes:
        data = await self._read_at_once(context, self._give_up)
        if len(data) > SMALL_MESSAGE_BYTES:
            raise too_large(SMALL_MESSAGE_BYTES)
        return data

    async def _read_at_once(self, context: Context, or_else: Callable[[Reading], Awaitable[None]]) -> bytes:
        """The message; what has not come by SLOW_S is for `or_else` to await or to refuse."""
        reading: Reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait({reading}, timeout=self._slow_s)
            if not reading.done():
                await or_else(reading)
        finally:
            reading.cancel()
        data = await reading
        if not isinstance(data, bytes):
            raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "the call came without a request", field="body")
        return data

    async def _give_up(self, _: Reading) -> None:
        raise self._bodies.too_slow(self._slow_s)

    async def _read_slowly(self, reading: Reading, message: Message) -> None:
        if self._slow >= self._most_slow:
            raise self._bodies.no_room()
        self._slow += 1
        try:
            message.take(self._slow_bytes)
            await asyncio.wait({reading}, timeout=self._timeout_s - self._slow_s)
        finally:
            self._slow -= 1
        if not reading.done():
            raise self._bodies.too_slow(self._timeout_s)
