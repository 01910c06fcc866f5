"""A client's bidirectional call on a connection of its own."""

import asyncio
from collections.abc import Sequence

import grpc
from grpc.aio import AioRpcError

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.streams import frames
from tidemill_mesh.streams.connection import Connection
from tidemill_mesh.streams.status import HTTP_CODES, Header, call_error, from_trailers
from tidemill_mesh.streams.stream import Stream
from tidemill_mesh.streams.tls import client_tls

STREAM_ID = 1


class ClientStream(Stream):
    """Ends with the server's status."""

    _answered = False

    def ending(self) -> "asyncio.Future[AioRpcError | None]":
        """Done when the call has ended, with its error; takes `on_end` for itself."""
        ended: asyncio.Future[AioRpcError | None] = asyncio.get_running_loop().create_future()
        self.on_end = lambda error: None if ended.done() else ended.set_result(error)
        return ended

    def take_headers(self, headers: Sequence[Header], *, last: bool) -> None:
        """The answer's headers, or its trailers."""
        if last:
            self.end(from_trailers(headers) if self._is_grpc(headers) else self._no_grpc(headers))
        elif not self._answered:
            self._answered = True
            if not self._is_grpc(headers):
                self.reset(frames.CANCEL, self._no_grpc(headers))

    def take_end(self) -> None:
        """gRPC servers end with trailers; this one did not."""
        self.end(call_error(grpc.StatusCode.INTERNAL, "the server ended the stream without a status"))

    def fail(self, error: AioRpcError) -> None:
        """This side does not take what the server sends."""
        self.reset(frames.CANCEL, error)

    def _is_grpc(self, headers: Sequence[Header]) -> bool:
        given = dict(headers)
        return self._answered or given.get(":status") == "200"

    def _no_grpc(self, headers: Sequence[Header]) -> AioRpcError:
        status = dict(headers).get(":status", "")
        code = HTTP_CODES.get(int(status) if status.isdecimal() else 0, grpc.StatusCode.UNKNOWN)
        return call_error(code, f"HTTP status {status!r} instead of gRPC's answer")


class ClientConnection(Connection):
    """Carries one call, and ends with it."""

    def preface(self) -> bytes:
        """A client begins."""
        return frames.PREFACE

    def take_stream(self, stream_id: int, headers: Sequence[Header], *, last: bool) -> None:
        """What still comes for a call that has ended here."""

    def forget(self, stream: Stream) -> None:
        """The one call has ended."""
        super().forget(stream)
        self.hang_up()


async def open_stream(
    endpoint: str, method: str, settings: ServiceSettings, *, timeout_s: float, max_message_bytes: int
) -> ClientStream:
    """Calls "package.Service/Method" at host:port, with TLS when the settings have it.

    AioRpcError (UNAVAILABLE) when no connection comes about in time. Callbacks set before the next await miss nothing.
    """
    host, _, port = endpoint.rpartition(":")
    tls = client_tls(settings)
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(settings.liveness_s), host.strip("[]"), int(port), ssl=tls
            )
    except (OSError, TimeoutError) as error:
        text = f"cannot connect to {endpoint}: {error or 'timeout'}"
        raise call_error(grpc.StatusCode.UNAVAILABLE, text) from error
    stream = ClientStream(connection, STREAM_ID, connection.first_stream_window, max_message_bytes)
    connection.streams[STREAM_ID] = stream
    headers = [
        (":method", "POST"),
        (":scheme", "http" if tls is None else "https"),
        (":path", f"/{method}"),
        (":authority", endpoint),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "tidemill"),
    ]
    connection.send_headers(STREAM_ID, headers, last=False)
    return stream
