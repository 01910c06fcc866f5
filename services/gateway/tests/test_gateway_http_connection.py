"""The HTTP server alone, on the event loop that services use."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tidemill_gateway.bodies import Bodies
from tidemill_gateway.http.connection import MAX_DISCARDED_BYTES, MAX_HEAD_BYTES, Connection, Connections
from tidemill_gateway.http.exchange import Exchange
from tidemill_gateway.http.server import serve_http
from tidemill_mesh.errors import MeshError

BIG_BYTES = 32 << 20
"""More than the kernel's buffers take."""

Answer = Callable[[Exchange], Coroutine[Any, Any, None]]


class App:
    """Answers with a coroutine of the test."""

    def __init__(self, answer: Answer, limit_bytes: int = 1 << 20) -> None:
        self.answer = answer
        self.limit_bytes = limit_bytes
        self.cancelled = 0

    def body_limit(self, exchange: Exchange) -> int:
        return self.limit_bytes

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await self.answer(exchange)
        except MeshError as error:
            exchange.fail(error)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def echo(exchange: Exchange) -> None:
    exchange.reply(200, exchange.method.encode() + exchange.path.encode() + b":" + exchange.body.whole(1 << 20))


class Transport(asyncio.Transport):
    """What a connection does with its socket, without one: the test says what is read at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.paused, self.closed = bytearray(), False, False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


def over_transport(app: App, bodies: Bodies) -> tuple[Connection, Transport]:
    connection, transport = Connection(app, Connections(), bodies, lambda: 0.0), Transport()
    connection.connection_made(transport)
    return connection, transport


@contextlib.asynccontextmanager
async def connected(app: App, **limits: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serve_http(app, "127.0.0.1", 0, **limits) as server, asyncio.timeout(120):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    if headers.get(b"transfer-encoding") != b"chunked":
        return first, headers, await reader.readexactly(int(headers.get(b"content-length", b"0")))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return first, headers, body


@pytest.fixture
def on_uvloop() -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test)

    return run


def test_requests_in_one_write_or_byte_by_byte_are_answered_in_order(on_uvloop):
    async def test() -> None:
        requests = b"".join(b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" % i for i in range(40))
        async with connected(App(echo)) as (reader, writer):
            writer.write(requests)
            for i in range(40):
                assert (await answer_of(reader))[2] == b"POST/%d:ab" % i
            for at in range(len(requests) // 20):
                writer.write(requests[at : at + 1])
                await writer.drain()
            for i in range(2):
                assert (await answer_of(reader))[2] == b"POST/%d:ab" % i

    on_uvloop(test())


def test_chunked_bodies_queries_and_escapes_are_understood(on_uvloop):
    async def test() -> None:
        async with connected(App(echo)) as (reader, writer):
            writer.write(
                b"POST /a%20b?c=d HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nxyz\r\n2\r\n!!\r\n0\r\n\r\n"
            )
            assert (await answer_of(reader))[2] == b"POST/a b:xyz!!"
            writer.write(b"GET http://host/there?x HTTP/1.1\r\nhost: host\r\n\r\n")
            assert (await answer_of(reader))[2] == b"GET/there:"

    on_uvloop(test())


def test_a_head_request_gets_the_length_and_no_body(on_uvloop):
    async def test() -> None:
        async with connected(App(echo)) as (reader, writer):
            writer.write(b"HEAD /x HTTP/1.1\r\n\r\nGET /y HTTP/1.1\r\nconnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 7\r\n" in head
            assert (await answer_of(reader))[2] == b"GET/y:"
            assert await reader.read() == b""

    on_uvloop(test())


def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection(on_uvloop):
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, b"text/plain")
        exchange.write(b"one")
        exchange.write(b"two", last=True)

    async def test() -> None:
        async with connected(App(stream)) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"connection: close" in head
            assert body == b"onetwo"

    on_uvloop(test())


def test_a_stream_in_chunks_leaves_the_connection_usable(on_uvloop):
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, b"text/plain")
        for part in (b"one", b"", b"two"):
            exchange.write(part)
        exchange.write(b"", last=True)

    async def test() -> None:
        async with connected(App(stream)) as (reader, writer):
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert (await answer_of(reader))[2] == b"onetwo"

    on_uvloop(test())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"nonsense\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES, b"431"),
     (b"POST / HTTP/1.1\r\ncontent-length: -4\r\n\r\n", b"400")],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_the_connection_closed(on_uvloop, sent, status):
    async def test() -> None:
        async with connected(App(echo)) as (reader, writer):
            writer.write(sent)
            first, headers, _ = await answer_of(reader)
            assert first.split()[1] == status
            assert headers[b"connection"] == b"close"
            # A reset, where the client had sent more than was read.
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""

    on_uvloop(test())


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"0\r\nx: ", b"a" * 1000), (b"0\r\n", b"x: a\r\n" * 100), (b"1;x=", b"a" * 1000)],
    ids=["one trailer", "many trailers", "a chunk's extension"],
)
def test_what_comes_beside_a_chunked_body_is_bounded_as_a_head_is(begin, more):
    bodies = Bodies(1 << 20)
    connection, transport = over_transport(App(echo), bodies)
    connection.data_received(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n" + begin)
    sent = 0
    while not transport.closed and sent < 2 * MAX_HEAD_BYTES:
        connection.data_received(more)
        sent += len(more)
    assert transport.written.split()[1] == b"431"
    assert MAX_HEAD_BYTES < sent <= MAX_HEAD_BYTES + 2 * len(more)
    assert bodies.held_bytes == 0


async def test_heads_and_trailers_count_for_one_request_only():
    connection, transport = over_transport(App(echo), Bodies(1 << 20))
    field = b"x: " + b"a" * (MAX_HEAD_BYTES * 2 // 3)
    request = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n%s\r\n\r\n0\r\n%s\r\n\r\n" % (field, field)
    for at in range(0, 3 * len(request), 1000):
        connection.data_received((3 * request)[at : at + 1000])
    async with asyncio.timeout(120):
        while transport.written.count(b"200 OK") < 3:
            await asyncio.sleep(0)
    assert not transport.closed


def test_a_large_body_is_dropped_as_it_comes_and_refused(on_uvloop):
    async def test() -> None:
        async with connected(App(echo, limit_bytes=100_000)) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
            first, headers, _ = await answer_of(reader)
            assert (first.split()[1], headers[b"connection"]) == (b"413", b"close")

    on_uvloop(test())


def test_a_body_without_end_is_refused_before_it_ends(on_uvloop):
    async def test() -> None:
        async with connected(App(echo, limit_bytes=1000)) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"

            async def send() -> None:
                with contextlib.suppress(ConnectionError):
                    for _ in range(MAX_DISCARDED_BYTES // (1 << 20) + 2):
                        writer.write(chunk)
                        await writer.drain()

            sending = asyncio.create_task(send())
            assert (await answer_of(reader))[0].split()[1] == b"413"
            await sending

    on_uvloop(test())


def test_a_client_that_leaves_cancels_its_answer(on_uvloop):
    async def test() -> None:
        begun = asyncio.Event()

        async def wait(exchange: Exchange) -> None:
            begun.set()
            await asyncio.Event().wait()

        app = App(wait)
        async with connected(app) as (_reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await begun.wait()
            writer.transport.abort()
            while not app.cancelled:
                await asyncio.sleep(0.001)

    on_uvloop(test())


def test_a_client_that_does_not_read_is_seen_and_so_is_its_return(on_uvloop):
    async def test() -> None:
        states: list[str] = []

        async def flood(exchange: Exchange) -> None:
            connection = exchange.connection
            connection.on_writable = lambda: states.append("writable")
            exchange.start(200, b"text/plain")
            while connection.writable:
                exchange.write(b"x" * 65536)
            states.append("full")
            await connection.drained()
            states.append("drained")
            exchange.write(b"end", last=True)

        async with connected(App(flood)) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            while states != ["full"]:
                await asyncio.sleep(0.001)
            body = (await answer_of(reader))[2]
            assert body.endswith(b"xend")
            assert states == ["full", "writable", "drained"]

    on_uvloop(test())


async def big(exchange: Exchange) -> None:
    exchange.reply(200, b"x" * BIG_BYTES)


@pytest.mark.parametrize("keep", [b"keep-alive", b"close"])
def test_a_client_that_leaves_a_complete_answer_unread_is_cut_off_and_counted(on_uvloop, keep):
    async def test() -> None:
        cut_off: list[None] = []
        slow = {"slow_client_s": 0.3, "on_slow_client": lambda: cut_off.append(None)}
        async with connected(App(big), **slow) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nconnection: %s\r\n\r\n" % keep)
            while not cut_off:
                await asyncio.sleep(0.01)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await answer_of(reader)
            await asyncio.sleep(0.5)
            assert len(cut_off) == 1

    on_uvloop(test())


def test_a_client_that_reads_slowly_gets_the_last_answer_of_its_connection_whole(on_uvloop):
    async def test() -> None:
        cut_off: list[None] = []
        slow = {"slow_client_s": 1.0, "on_slow_client": lambda: cut_off.append(None)}
        async with connected(App(big), **slow) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            for part in range(16):
                await reader.readexactly(BIG_BYTES // 16)
                # In all several times as long as one may read nothing.
                await asyncio.sleep(0.15)
                if part == 8:
                    # The process itself stands still for longer, after a look at the client.
                    await asyncio.sleep(0.3)
                    time.sleep(1.2)  # noqa: ASYNC251
            assert await reader.read() == b""
            assert not cut_off

    on_uvloop(test())


def test_requests_sent_ahead_are_not_answered_before_the_answers_are_read(on_uvloop):
    async def test() -> None:
        asked: list[str] = []

        async def answer(exchange: Exchange) -> None:
            asked.append(exchange.path)
            exchange.reply(200, b"x" * (BIG_BYTES // 4))

        async with connected(App(answer)) as (reader, writer):
            writer.write(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % i for i in range(24)) + b"nonsense\r\n\r\n")
            while not asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            assert len(asked) < 4
            for _ in range(24):
                assert len((await answer_of(reader))[2]) == BIG_BYTES // 4
            assert asked == [f"/{i}" for i in range(24)]
            assert await reader.read() == b""

    on_uvloop(test())


def test_the_end_of_the_server_closes_idle_connections(on_uvloop):
    async def test() -> None:
        async with serve_http(App(echo), "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await answer_of(reader)
            await server.end()
            assert await reader.read() == b""
            writer.close()

    on_uvloop(test())


async def test_a_client_that_asks_first_is_told_to_go_on_or_that_its_body_is_too_large():
    async with connected(App(echo)) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 70000\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x" * 70_000)
        assert (await answer_of(reader))[0] == b"HTTP/1.1 200 OK"
        writer.write(b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        first, headers, _ = await answer_of(reader)
        assert (first.split()[1], headers[b"connection"]) == (b"413", b"close")
        assert await reader.read() == b""


async def test_nothing_is_written_into_an_answer_for_a_request_that_follows_it():
    begun, seen = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        begun.set()
        await seen.wait()
        await echo(exchange)

    class Watched(App):
        def body_limit(self, exchange: Exchange) -> int:
            seen.set()
            return super().body_limit(exchange)

    async with connected(Watched(slow)) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\n\r\n")
        await begun.wait()
        body = b"x" * 70_000
        writer.write(b"POST /b HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await answer_of(reader))[2] == b"GET/a:"
        assert (await answer_of(reader))[2] == b"POST/b:" + body
