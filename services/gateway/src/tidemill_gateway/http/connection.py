"""One HTTP/1.1 connection: parses requests, has them answered one after another, writes straight to the transport.

There is no ASGI between: a streamed token costs one call here and one write, and a client that leaves is known at once.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

import httptools
import orjson

from tidemill_gateway.bodies import TOO_SLOW, Bodies
from tidemill_gateway.http.body import Body
from tidemill_gateway.http.exchange import Exchange, status_line

MAX_HEAD_BYTES = 64 << 10
"""Of a head, and of what comes beside a chunked body: the parser joins a trailer's value in time that grows with its
square, and says nothing of it before its end."""
SMALL_BODY_BYTES = 64 << 10
"""A body of at most so many bytes is read whatever the head says."""
MAX_DISCARDED_BYTES = 64 << 20
"""Of a body that is too large, read and dropped so that the client gets to see the answer."""
MAX_WAITING = 16
"""Requests that a client may send ahead of their answers, while their bodies are small: no time limit is on them."""


class App(Protocol):
    """What answers requests."""

    def body_limit(self, exchange: Exchange) -> int:
        """Bytes of body worth keeping, judged by the head alone."""

    def __call__(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Answers one request, whatever happens."""


class Connections:
    """The open connections of a server."""

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self._none = asyncio.Event()
        self._none.set()

    def add(self, connection: "Connection") -> None:
        """A client has connected."""
        self.open.add(connection)
        self._none.clear()

    def remove(self, connection: "Connection") -> None:
        """It is gone."""
        self.open.discard(connection)
        if not self.open:
            self._none.set()

    async def wait_none(self) -> None:
        """Returns when all are gone."""
        await self._none.wait()


class _Part(enum.Enum):
    """What comes next from the client."""

    HEAD = 1
    BODY = 2
    NOTHING = 3
    """After an error, or a request that is the connection's last."""


class Connection(asyncio.Protocol):
    """Parser callbacks on one side, `Exchange` on the other."""

    def __init__(self, app: App, connections: Connections, bodies: Bodies, clock: Callable[[], float]) -> None:
        self.writable = True
        self.on_writable: Callable[[], None] | None = None
        self.quiet_since = clock()
        """Since when the client has sent nothing that we wait for."""
        self.unread = 0
        """Bytes that waited for the client when `does_not_read` last looked."""
        self._unread_since = self.quiet_since
        self._app = app
        self._connections = connections
        self._bodies = bodies
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._part = _Part.HEAD
        self._head_bytes = 0
        """Read since a head or a request ended, or a piece of a body came."""
        self._advanced = False
        """Whether that has happened in the bytes being parsed: they are not all of what comes now."""
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._incoming: Exchange | None = None
        self._coming_since: float | None = None
        """Since when a request has been on its way, or we have been ready again for the rest of it."""
        self._waiting: deque[Exchange] = deque()
        self._paused = False
        """Whether we read no more for now."""
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    # --- for the server and the exchange -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._task is not None

    @property
    def closing(self) -> bool:
        """Whether the last bytes wait for the client to read them."""
        return self._transport is not None and self._transport.is_closing()

    def does_not_read(self, now: float, limit_s: float) -> bool:
        """Whether the client has taken nothing of a complete answer for so long, as far as calls of this have seen.

        A stream that still runs is watched where its tokens wait.
        """
        left = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if self.busy or left != self.unread or not (left or self.closing):
            self.unread, self._unread_since = left, now
        if left:
            # Its turn to send comes when it has read.
            self.quiet_since = now
        return now - self._unread_since > limit_s

    def refuse_slow(self, now: float, limit_s: float) -> None:
        """Ends the connection of a client whose request has been on its way for longer than this."""
        if self._coming_since is not None and not self._paused and now - self._coming_since > limit_s:
            self._bodies.on_refused(TOO_SLOW)
            self._refuse(408, "the request took too long to arrive", code="request_timeout", limit=f"{limit_s:g} s")

    @property
    def _ahead(self) -> bool:
        """Whether so much waits that we should read no more for now."""
        if len(self._waiting) >= MAX_WAITING:
            return True
        return sum(exchange.body.held_bytes for exchange in self._waiting) > SMALL_BODY_BYTES

    @property
    def client_host(self) -> str:
        """The client's address."""
        peer = self._transport.get_extra_info("peername") if self._transport else None
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def write(self, data: bytes) -> None:
        """Queues bytes for the client."""
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        """Returns when the client has read enough to be sent more."""
        if not self.writable:
            self._drained = self._drained or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    def cut(self) -> None:
        """Drops the connection and what is still to be sent."""
        self._take_no_more()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Closes when what was written is sent."""
        self._take_no_more()
        if self._transport is not None:
            self._transport.close()

    def end_when_idle(self) -> None:
        """Takes no further request; closes at once when none is being answered."""
        self._take_no_more()
        if not self.busy:
            self.close()

    def _take_no_more(self) -> None:
        """Forgets requests that are not being answered, and what is on its way."""
        self._stop_receiving()
        for exchange in self._waiting:
            exchange.body.drop()
        self._waiting.clear()

    def _stop_receiving(self) -> None:
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.body.drop()
        self._part, self._coming_since = _Part.NOTHING, None

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """The client, or this side, has closed: nobody is left to answer."""
        self._connections.remove(self)
        self._transport = None
        self._take_no_more()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client does not read."""
        self.writable = False

    def resume_writing(self) -> None:
        """The client reads again."""
        self.writable = True
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        if self.on_writable is not None:
            self.on_writable()
        if self._task is None:
            self._begin_waiting()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self._part is _Part.NOTHING:
            return
        self.quiet_since = self._clock()
        self._advanced = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing is offered beside HTTP/1.1: the request is answered as what it also is.
            self._stop_receiving()
        except httptools.HttpParserError:
            self._refuse(400, "the bytes are no HTTP/1.1 request")
            return
        if not self._advanced:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                what = "head is" if self._part is _Part.HEAD else "trailers or chunk extensions are"
                self._refuse(431, f"the request's {what} larger than {MAX_HEAD_BYTES} bytes")

    def _advance(self) -> None:
        self._head_bytes, self._advanced = 0, True

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._part, self._coming_since = _Part.HEAD, self.quiet_since
        self._url, self._headers = b"", {}

    def on_url(self, url: bytes) -> None:
        """The target, or a piece of it."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers say nothing that anybody asks for."""
        if self._part is _Part.HEAD:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is complete."""
        parser, headers = self._parser, self._headers
        exchange = Exchange(
            self,
            method=parser.get_method().decode("ascii"),
            target=self._url,
            headers=headers,
            http_1_1=parser.get_http_version() == "1.1",
            keep_alive=parser.should_keep_alive(),
            body=Body(self._bodies, SMALL_BODY_BYTES),
        )
        self._incoming, self._part = exchange, _Part.BODY
        self._advance()
        length = headers.get(b"content-length")
        if b"transfer-encoding" in headers or (length is not None and int(length) > SMALL_BODY_BYTES):
            exchange.body.limit_bytes = self._app.body_limit(exchange)
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._expected(exchange, int(length or b"0"))

    def _expected(self, exchange: Exchange, length: int) -> None:
        """The client asks before it sends a body: one that will be refused it need not send at all."""
        if not exchange.body.expect(length):
            self._begin_last(exchange)
        elif not (self.busy or self._waiting):
            # Not into an answer that is under way: the client sends without it after a while.
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        """A piece of the body; kept within the limits."""
        self._advance()
        exchange = self._incoming
        if exchange is None:
            return
        exchange.body.add(part)
        if exchange.body.size_bytes > exchange.body.limit_bytes + MAX_DISCARDED_BYTES:
            self._begin_last(exchange)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._advance()
        exchange, self._incoming, self._coming_since = self._incoming, None, None
        if exchange is None or self._part is _Part.NOTHING:
            return
        self._part = _Part.HEAD if exchange.keep_alive else _Part.NOTHING
        self._begin(exchange)

    # --- answering ---------------------------------------------------------------------------------------------------

    def _begin_last(self, exchange: Exchange) -> None:
        """Answers a request without the rest of its body."""
        exchange.keep_alive = False
        self._stop_receiving()
        self._begin(exchange)

    def _begin(self, exchange: Exchange) -> None:
        self._waiting.append(exchange)
        if self._task is None:
            self._begin_waiting()
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._transport is None or self._ahead == self._paused:
            return
        self._paused = not self._paused
        if self._paused:
            self._transport.pause_reading()
            return
        self._transport.resume_reading()
        if self._coming_since is not None:
            self._coming_since = self._clock()

    def _begin_waiting(self) -> None:
        """Begins the next answer, if one is asked for, once the client has read enough of those before: what is sent
        ahead and never read must not grow here."""
        if self._waiting and self.writable:
            exchange = self._waiting.popleft()
            self._pause_or_resume()
            self._task = asyncio.get_running_loop().create_task(self._answer(exchange))
            # Not in `_answer`, which never begins when the client leaves at once.
            self._task.add_done_callback(lambda _: exchange.body.drop())

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._app(exchange)
        finally:
            self._task = None
            self._answered(exchange)

    def _answered(self, exchange: Exchange) -> None:
        self._unread_since = self._clock()
        if not (exchange.complete and exchange.keep_alive):
            self.close()
        elif self._waiting:
            self._begin_waiting()
        elif self._part is _Part.NOTHING:
            self.close()
        else:
            self.quiet_since = self._unread_since

    def _refuse(self, status: int, message: str, *, code: str = "invalid_http", limit: str = "") -> None:
        """Answers what is no request; a client that waits for an earlier answer gets only that."""
        self._stop_receiving()
        if self.busy or self._waiting:
            return
        error = {"message": message, "type": "invalid_request_error", "param": "body" if limit else None, "code": code}
        body = orjson.dumps({"error": error | ({"limit": limit} if limit else {})})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.write(status_line(status) + head + body)
        self.close()
