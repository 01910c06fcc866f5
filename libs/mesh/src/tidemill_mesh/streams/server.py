"""A server of bidirectional calls: each method is a function that is given the call, and sets its callbacks."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence

import grpc
from grpc.aio import AioRpcError

from tidemill_mesh.listener import Listener
from tidemill_mesh.streams import frames
from tidemill_mesh.streams.connection import CLOSE_S, Connection
from tidemill_mesh.streams.frames import ProtocolError
from tidemill_mesh.streams.status import Header, call_error, to_trailers
from tidemill_mesh.streams.stream import Stream

RESPONSE_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
MAX_STREAMS = 128
LOOK_S = 0.02


class ServerStream(Stream):
    """Ends with `finish`, or with the client."""

    _started = False
    _client_done = False
    _last: AioRpcError | None = None
    _finishing = False

    def __init__(self, connection: Connection, stream_id: int, send_window: int, max_message_bytes: int) -> None:
        super().__init__(connection, stream_id, send_window, max_message_bytes)
        self.on_client_done: Callable[[], object] = self.finish

    def send(self, message: bytes) -> None:
        """Sends a message, the first one behind the answer's headers."""
        if not self._started and not self.ended:
            self._started = True
            self._carrier.send_headers(self.id, RESPONSE_HEADERS, last=False)
        if not self._finishing:
            super().send(message)

    def finish(self, error: AioRpcError | None = None) -> None:
        """Ends the call with a status, after what was sent."""
        if self.ended or self._finishing:
            return
        self._finishing, self._last = True, error
        if not self.unsent:
            self.all_sent()

    def all_sent(self) -> None:
        """The status follows the last message."""
        if not self._finishing:
            super().all_sent()
            return
        trailers = to_trailers(self._last)
        self._carrier.send_headers(self.id, trailers if self._started else [*RESPONSE_HEADERS, *trailers], last=True)
        if not self._client_done:
            self._carrier.write(frames.reset(self.id, frames.NO_ERROR))
        self.end(self._last)

    def take_headers(self, headers: Sequence[Header], *, last: bool) -> None:
        """Trailers of a client, of which gRPC knows none."""
        if last:
            self.take_end()

    def take_end(self) -> None:
        """The client has said all."""
        self._client_done = True
        if not self.ended:
            self.on_client_done()

    def fail(self, error: AioRpcError) -> None:
        """This side does not take what the client sends."""
        self.unsent.clear()
        self.finish(error)


Handler = Callable[[ServerStream], None]


class ServerConnection(Connection):
    """One client's calls."""

    def __init__(
        self, silence_s: float, max_message_bytes: int, methods: Mapping[str, Handler], all: "set[ServerConnection]"
    ) -> None:
        super().__init__(silence_s)
        self._max_message_bytes = max_message_bytes
        self._methods = methods
        self._all = all
        self._greeted = False
        self._last_id = 0
        self._refusing = False

    def refuse_new(self) -> None:
        """The calls that it has are its last."""
        self._refusing = True
        self.write(frames.goaway(self._last_id, frames.NO_ERROR, "shutting down"))

    def take_preface(self, data: bytes) -> bytes | None:
        """A client begins with the words that no older HTTP knows."""
        if self._greeted:
            return data
        size = len(frames.PREFACE)
        if not frames.PREFACE.startswith(data[:size]):
            raise ProtocolError(frames.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        if len(data) < size:
            return None
        self._greeted = True
        return data[size:]

    def take_stream(self, stream_id: int, headers: Sequence[Header], *, last: bool) -> None:
        """A new call."""
        if stream_id <= self._last_id:
            return
        if stream_id % 2 == 0:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a stream id that is not a client's")
        self._last_id = stream_id
        if self._refusing or len(self.streams) >= MAX_STREAMS:
            self.write(frames.reset(stream_id, frames.REFUSED_STREAM))
            return
        stream = ServerStream(self, stream_id, self.first_stream_window, self._max_message_bytes)
        self.streams[stream_id] = stream
        path = dict(headers).get(":path", "")
        method = self._methods.get(path.removeprefix("/"))
        if method is None:
            stream.finish(call_error(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {path}"))
            return
        method(stream)
        if last:
            stream.take_end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; one whose TLS handshake fails never is."""
        self._all.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone."""
        self._all.discard(self)
        super().connection_lost(error)


class StreamServer:
    """A listening server and its connections."""

    def __init__(self, port: int, listener: Listener, connections: set[ServerConnection]) -> None:
        self.port = port
        self._listener = listener
        self._connections = connections

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones go on for grace_s, ends the rest."""
        await self._listener.close()
        for connection in list(self._connections):
            connection.refuse_new()
        deadline = asyncio.get_running_loop().time() + grace_s
        while any(connection.streams for connection in self._connections):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0.0:
                break
            await asyncio.sleep(min(LOOK_S, left_s))
        ending = list(self._connections)
        for connection in ending:
            connection.close(call_error(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
        # What they say last is sent, or given up after CLOSE_S: the loop may end with this server.
        if ending:
            await asyncio.wait([connection.lost for connection in ending], timeout=2 * CLOSE_S)


async def serve_streams(
    host: str,
    port: int,
    methods: Mapping[str, Handler],
    *,
    silence_s: float,
    max_message_bytes: int,
    tls: ssl.SSLContext | None = None,
) -> StreamServer:
    """Serves "package.Service/Method" until it is stopped; port 0 is any free one. OSError when it is taken."""
    connections: set[ServerConnection] = set()
    bound = _bind(host.strip("[]"), port)
    listener = Listener(bound, lambda: ServerConnection(silence_s, max_message_bytes, methods, connections), tls=tls)
    return StreamServer(int(bound.getsockname()[1]), listener, connections)


def _bind(host: str, port: int) -> socket.socket:
    """One socket, on the first address of a name that has several: there is one port to tell peers."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets take it over: small messages are sent at once.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
