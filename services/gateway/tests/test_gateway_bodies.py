"""Bodies in flight: one bound for all clients, a time to arrive, and nothing that stays behind."""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable

import orjson
from hypothesis import given
from hypothesis import strategies as st
from test_gateway_http_connection import App, answer_of, echo, over_transport

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_gateway.bodies import Bodies
from tidemill_gateway.http.body import PART_BYTES, Body
from tidemill_gateway.http.connection import SMALL_BODY_BYTES
from tidemill_gateway.http.exchange import Exchange
from tidemill_gateway.http.server import serve_http
from tidemill_mesh.errors import MeshError

BODY_BYTES = 200_000
HEAD = b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % BODY_BYTES
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def clients(
    count: int, bodies: Bodies, app: App | None = None, timeout_s: float = 60
) -> AsyncIterator[list[Streams]]:
    """Connections to a server with these bounds; at the end nothing is held for any of them."""
    app = app or App(echo)
    async with serve_http(app, "127.0.0.1", 0, bodies=bodies, receive_timeout_s=timeout_s) as server:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(300):
            opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
            for _, writer in opened:
                stack.callback(writer.close)
            yield opened
        await until(lambda: bodies.held_bytes == 0)


async def test_bodies_that_come_slowly_from_many_clients_keep_within_one_bound():
    bodies, most, reasons = Bodies(10 * BODY_BYTES), 0, []
    async with clients(40, bodies) as opened:
        bodies.on_refused = reasons.append
        for _, writer in opened:
            writer.write(HEAD)
        for _ in range(19):
            for _, writer in opened:
                writer.write(b"x" * (BODY_BYTES // 20))
            await asyncio.sleep(0.001)
            most = max(most, bodies.held_bytes)
        await until(lambda: len(reasons) >= 40 - 10)
        most = max(most, bodies.held_bytes)
        for _, writer in opened:
            writer.write(b"x" * (BODY_BYTES // 20))
        answers = [await answer_of(reader) for reader, _ in opened]
    assert 5 * BODY_BYTES < most <= bodies.limit_bytes
    statuses = [first.split()[1] for first, _, _ in answers]
    assert statuses.count(b"200") >= 5
    assert statuses.count(b"429") == len(reasons) == 40 - statuses.count(b"200")
    _, headers, body = answers[statuses.index(b"429")]
    error = orjson.loads(body)["error"]
    assert (error["code"], error["param"], error["limit"]) == (
        "rate_limit_exceeded",
        "body",
        f"{10 * BODY_BYTES} bytes",
    )
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"1", b"true")


async def test_a_refused_client_may_send_again_on_the_same_connection_once_there_is_room():
    bodies = Bodies(BODY_BYTES + 40_000)
    async with clients(2, bodies) as [(_, first), (reader, second)]:
        first.write(HEAD + b"x" * 100_000)
        await until(lambda: bodies.held_bytes >= 100_000)
        second.write(HEAD + b"x" * BODY_BYTES)
        assert (await answer_of(reader))[0].split()[1] == b"429"
        first.close()
        await until(lambda: bodies.held_bytes == 0)
        second.write(HEAD + b"x" * BODY_BYTES)
        assert (await answer_of(reader))[0].split()[1] == b"200"


async def test_a_client_that_asks_first_need_not_send_what_finds_no_room():
    bodies = Bodies(BODY_BYTES)
    async with clients(2, bodies) as [(_, first), (reader, second)]:
        first.write(HEAD + b"x" * 150_000)
        await until(lambda: bodies.held_bytes >= 150_000)
        second.write(HEAD[:-2] + b"expect: 100-continue\r\n\r\n")
        assert (await answer_of(reader))[0].split()[1] == b"429"
        assert await reader.read() == b""


async def test_a_body_or_a_head_that_trickles_in_is_refused_in_the_end():
    bodies, reasons = Bodies(1 << 20), []
    async with clients(2, bodies, timeout_s=0.4) as opened:
        bodies.on_refused = reasons.append
        opened[0][1].write(HEAD + b"x" * 100_000)
        opened[1][1].write(b"POST /x HTTP/1.1\r\n")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    opened[0][1].write(b"y")
                    opened[1][1].write(b"a: b\r\n")
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        for reader, _ in opened:
            first, headers, body = await answer_of(reader)
            error = orjson.loads(body)["error"]
            assert (first.split()[1], headers[b"connection"]) == (b"408", b"close")
            assert (error["code"], error["param"], error["limit"]) == ("request_timeout", "body", "0.4 s")
        trickling.cancel()
        assert reasons == ["too_slow", "too_slow"]
        await until(lambda: bodies.held_bytes == 0)


async def test_a_body_counts_until_its_request_is_accepted_and_no_longer():
    bodies, accepted, end = Bodies(1 << 20), asyncio.Event(), asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        exchange.body.whole(1 << 20)
        await accepted.wait()
        exchange.body.drop()
        await end.wait()
        exchange.reply(200, b"")

    async with clients(1, bodies, App(wait)) as [(reader, writer)]:
        writer.write(HEAD + b"x" * BODY_BYTES)
        await until(lambda: bodies.held_bytes >= BODY_BYTES)
        accepted.set()
        await until(lambda: bodies.held_bytes == 0)
        end.set()
        assert (await answer_of(reader))[0].split()[1] == b"200"


async def test_a_request_that_runs_has_at_most_one_large_body_wait_behind_it():
    bodies, end, answered = Bodies(64 << 20), asyncio.Event(), 0

    async def wait(exchange: Exchange) -> None:
        nonlocal answered
        await end.wait()
        answered += 1
        exchange.reply(200, b"")

    connection, transport = over_transport(App(wait), bodies)
    large = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (1 << 20) + b"x" * (1 << 20)
    sent = b"GET / HTTP/1.1\r\n\r\n" + large * 3
    parts = deque(sent[at : at + SMALL_BODY_BYTES] for at in range(0, len(sent), SMALL_BODY_BYTES))
    while parts and not transport.paused:
        connection.data_received(parts.popleft())
    assert 1 << 20 <= bodies.held_bytes <= (1 << 20) + 2 * SMALL_BODY_BYTES
    end.set()
    async with asyncio.timeout(120):
        while parts:
            while transport.paused:
                await asyncio.sleep(0)
            connection.data_received(parts.popleft())
        while answered < 4:
            await asyncio.sleep(0)
    connection.connection_lost(None)
    await until(lambda: bodies.held_bytes == 0)


async def test_clients_that_leave_give_back_what_was_read_answered_or_waiting():
    bodies = Bodies(1 << 20)

    async def never(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    whole = b"POST /x HTTP/1.1\r\ncontent-length: 9000\r\n\r\n" + b"x" * 9000
    async with clients(4, bodies, App(never)) as opened:
        for count, (_, writer) in enumerate(opened):
            writer.write(whole * count + whole[:-1])
        await until(lambda: bodies.held_bytes >= 10 * 8000)
        for _, writer in opened:
            writer.transport.abort()


@given(
    st.lists(st.tuples(st.sampled_from(["new", "add", "drop"]), st.integers(0, 5), st.integers(1, 400)), max_size=80)
)
def test_what_is_held_is_the_sum_of_the_parts_that_are_kept(steps):
    bodies = Bodies(1500)
    open_bodies: list[Body] = []
    sent: list[bytes] = []
    for kind, which, size in steps:
        if kind == "new" or not open_bodies:
            open_bodies.append(Body(bodies, 600))
            sent.append(b"")
            continue
        body, i = open_bodies[which % len(open_bodies)], which % len(open_bodies)
        if kind == "drop":
            body.drop()
            open_bodies.pop(i)
            sent.pop(i)
            continue
        body.add(b"z" * size)
        sent[i] += b"z" * size
        assert 0 <= bodies.held_bytes <= bodies.limit_bytes
    for body, all_of_it in zip(open_bodies, sent, strict=True):
        with contextlib.suppress(MeshError):
            assert body.whole(600) == all_of_it
        body.drop()
    assert bodies.held_bytes == 0


def test_tiny_parts_count_for_what_they_take():
    bodies = Bodies(10 * PART_BYTES)
    body = Body(bodies, 1 << 20)
    for _ in range(10):
        body.add(b"x")
    assert bodies.held_bytes == 0


async def test_a_gateway_refuses_counts_and_forgets(bare_mesh):
    bare_mesh.settings = dataclasses.replace(bare_mesh.settings, max_inflight_body_bytes=1 << 20)
    await bare_mesh.add(ROLE_PREFILL)
    await bare_mesh.add(ROLE_DECODE)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    host, port = bare_mesh.http.removeprefix("http://").split(":")

    async def opened() -> Streams:
        return await asyncio.open_connection(host, int(port))

    async def get(path: str) -> str:
        reader, writer = await opened()
        writer.write(b"GET %s HTTP/1.1\r\nconnection: close\r\n\r\n" % path.encode())
        text = (await reader.read()).decode()
        writer.close()
        return text

    async def held() -> int:
        return int(orjson.loads((await get("/debug/holds")).partition("\r\n\r\n")[2])["body_bytes"])

    body = orjson.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "metadata": {"pad": "x" * 700_000}})
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    slow_reader, slow = await opened()
    slow.write(head + body[:-1])
    async with asyncio.timeout(120):
        while await held() < 700_000:
            await asyncio.sleep(0.01)
        reader, other = await opened()
        other.write(head + body)
        assert (await answer_of(reader))[0].split()[1] == b"429"
        slow.write(body[-1:])
        assert (await answer_of(slow_reader))[0].split()[1] == b"200"
        other.write(head + body)
        assert (await answer_of(reader))[0].split()[1] == b"200"
    assert await held() == 0
    assert 'tidemill_gateway_refused_bodies_total{reason="no_room"} 1.0' in await get("/metrics")
    slow.close()
    other.close()
