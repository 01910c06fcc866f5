"""Streams on the event loop: they speak gRPC with gRPC's own client and server, and with each other."""

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError

from tidemill.mesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tidemill.mesh.v1.worker_pb2 import ConnectRequest, ConnectResponse
from tidemill.v1 import errors_pb2
from tidemill_mesh.channels import Channels, connect
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_mesh.server import GrpcServer, Servicer, serve_grpc
from tidemill_mesh.streams import connection, frames
from tidemill_mesh.streams.bridge import async_handler
from tidemill_mesh.streams.client import ClientStream
from tidemill_mesh.streams.server import ServerConnection, ServerStream, StreamServer, serve_streams

SettingsMaker = Callable[..., ServiceSettings]
SERVICE = "tidemill.mesh.v1.WorkerService"
CONNECT = f"{SERVICE}/Connect"
BOUND_S = 120.0
LARGE = 1 << 20
"""Bytes: more than any window that the other side opens at first."""


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends the secret of each ticket back; fails, ends, waits or drops its work when it is asked to."""

    def __init__(self) -> None:
        self.ended = 0

    async def serve(self, requests: AsyncIterator[ConnectRequest]) -> AsyncGenerator[ConnectResponse, None]:
        try:
            async for request in requests:
                match request.hello.expected_incarnation:
                    case "refuse":
                        raise MeshError(errors_pb2.ERROR_CODE_STALE, "another one é", field="hello", limit="one")
                    case "fault":
                        raise ZeroDivisionError
                    case "end":
                        return
                    case "drop":
                        raise asyncio.CancelledError
                for hand_over in request.hand_overs:
                    offer = worker_pb2.TicketOffer(ticket=worker_pb2.Ticket(secret=hand_over.target.endpoint.encode()))
                    yield ConnectResponse(tickets=[offer])
                if request.ping:
                    yield ConnectResponse(pong=True)
        finally:
            self.ended += 1

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[ConnectResponse]:
        responses = self.serve(request_iterator)
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response


@contextlib.asynccontextmanager
async def serving(worker: Worker, settings: ServiceSettings) -> AsyncIterator[GrpcServer]:
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    streams = {CONNECT: async_handler(CONNECT, worker.serve, ConnectRequest)}
    async with serve_grpc(settings, [Servicer(add, worker, SERVICE, streams)]) as server:
        yield server


class Caller:
    """A stream's client with its messages in a queue."""

    def __init__(self, stream: ClientStream) -> None:
        self.stream = stream
        self.messages: asyncio.Queue[ConnectResponse] = asyncio.Queue()
        self.end: asyncio.Future[AioRpcError | None] = asyncio.get_running_loop().create_future()
        stream.on_message = lambda data: self.messages.put_nowait(ConnectResponse.FromString(data))
        stream.on_end = self.end.set_result

    def send(self, **fields: Any) -> None:
        self.stream.send(ConnectRequest(**fields).SerializeToString())

    def say(self, word: str) -> None:
        self.send(hello=worker_pb2.Hello(expected_incarnation=word))

    def send_text(self, text: str) -> None:
        self.send(hand_overs=[worker_pb2.HandOver(target=common_pb2.Target(endpoint=text))])

    async def text(self) -> str:
        async with asyncio.timeout(BOUND_S):
            return (await self.messages.get()).tickets[0].ticket.secret.decode()

    async def failure(self) -> MeshError:
        async with asyncio.timeout(BOUND_S):
            error = await self.end
        assert error is not None
        return from_rpc_error(error)


@pytest.fixture
async def worker() -> Worker:
    return Worker()  # type: ignore[abstract]


@pytest.fixture(params=["stream_endpoint", "endpoint"], ids=["to ours", "to gRPC's"])
async def caller(
    request: Any, worker: Worker, mesh_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Caller]:
    """Our client at either server, with small windows."""
    monkeypatch.setattr(connection, "RECEIVE_WINDOW", 100_000)
    settings = mesh_settings()
    channels = Channels(settings)
    async with serving(worker, settings) as server:
        caller = Caller(await channels.open_stream(CONNECT, [getattr(server, request.param)]))
        yield caller
        caller.stream.cancel()
    await channels.close()


async def test_messages_arrive_whole_and_in_order(caller: Caller) -> None:
    for i in range(50):
        caller.send_text(f"number {i}")
    assert [await caller.text() for _ in range(50)] == [f"number {i}" for i in range(50)]


async def test_messages_larger_than_every_window_arrive_whole(caller: Caller) -> None:
    texts = ["x" * LARGE, "small", "y" * LARGE, ""]
    for text in texts:
        caller.send_text(text)
    assert [await caller.text() for _ in texts] == texts


async def test_an_error_arrives_with_its_details(caller: Caller) -> None:
    caller.say("refuse")
    failure = await caller.failure()
    assert failure.code == errors_pb2.ERROR_CODE_STALE
    assert (failure.message, failure.field, failure.limit) == ("another one é", "hello", "one")


@pytest.mark.parametrize(
    ("word", "code"), [("fault", errors_pb2.ERROR_CODE_INTERNAL), ("drop", errors_pb2.ERROR_CODE_UNAVAILABLE)]
)
async def test_a_handler_that_fails_gives_a_status(caller: Caller, word: str, code: int) -> None:
    caller.say(word)
    assert (await caller.failure()).code == code


async def test_a_handler_that_returns_ends_the_call_well(caller: Caller) -> None:
    caller.say("end")
    async with asyncio.timeout(BOUND_S):
        assert await caller.end is None


async def test_a_cancelled_call_ends_its_handler(caller: Caller, worker: Worker) -> None:
    caller.send_text("hello")
    await caller.text()
    caller.stream.cancel()
    error = await caller.end
    assert error is not None
    assert error.code() == grpc.StatusCode.CANCELLED
    async with asyncio.timeout(BOUND_S):
        while not worker.ended:
            await asyncio.sleep(0.01)


async def test_grpcs_own_client_is_served_on_the_port_for_streams(worker: Worker, mesh_settings: SettingsMaker) -> None:
    async with serving(worker, mesh_settings()) as server, connect(server.stream_endpoint, mesh_settings()) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        calls = [stub.Connect() for _ in range(3)]
        for call in calls:
            await call.write(
                ConnectRequest(hand_overs=[worker_pb2.HandOver(target=common_pb2.Target(endpoint="z" * LARGE))])
            )
        for call in calls:
            answer = await call.read()
            assert isinstance(answer, ConnectResponse)
            assert answer.tickets[0].ticket.secret == b"z" * LARGE
        await calls[0].done_writing()
        assert await calls[0].read() is grpc.aio.EOF
        assert await calls[0].code() == grpc.StatusCode.OK
        await calls[1].write(ConnectRequest(hello=worker_pb2.Hello(expected_incarnation="refuse")))
        with pytest.raises(AioRpcError) as refused:
            await calls[1].read()
        assert from_rpc_error(refused.value).field == "hello"
        calls[2].cancel()
        with pytest.raises(AioRpcError) as unknown:
            await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_stops_ends_its_calls(worker: Worker, mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    channels = Channels(settings)
    async with serving(worker, settings) as server:
        caller = Caller(await channels.open_stream(CONNECT, [server.stream_endpoint]))
        caller.send_text("hello")
        await caller.text()
    assert (await caller.failure()).code == errors_pb2.ERROR_CODE_UNAVAILABLE
    assert worker.ended == 1
    with pytest.raises(AioRpcError) as refused:
        await channels.open_stream(CONNECT, [server.stream_endpoint])
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_call_goes_to_the_next_endpoint_where_the_first_cannot_be_reached(
    worker: Worker, mesh_settings: SettingsMaker
) -> None:
    settings = mesh_settings()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        async with serving(worker, settings) as server:
            caller = Caller(await Channels(settings).open_stream(CONNECT, [nobody, server.endpoint]))
            caller.send_text("hello")
            assert await caller.text() == "hello"
            caller.stream.cancel()


async def test_a_peer_that_says_nothing_any_more_is_noticed(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings(liveness_s=1.0)
    held: list[asyncio.StreamWriter] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        while await reader.read(1 << 16):
            pass

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as silent:
        endpoint = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        caller = Caller(await Channels(settings).open_stream(CONNECT, [endpoint]))
        failure = await caller.failure()
        for writer in held:
            writer.close()
    assert (failure.code, failure.message) == (errors_pb2.ERROR_CODE_UNAVAILABLE, "ping timeout")


async def test_a_peer_that_does_not_read_keeps_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_S", 0.05)
    reads, gone = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 26}) + frames.window_update(0, 1 << 26))
            await reads.wait()
            while await reader.read(1 << 16):
                pass
        writer.close()
        gone.set()

    async with asyncio.timeout(BOUND_S), await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        caller = Caller(await Channels(ServiceSettings()).open_stream(CONNECT, [endpoint]))
        while caller.stream.writable:
            caller.send_text("x" * LARGE)
            await asyncio.sleep(0)
        held = caller.stream._carrier
        assert isinstance(held, connection.Connection)
        caller.stream.cancel()
        await held.lost
        reads.set()
        await gone.wait()


async def test_a_quiet_stream_stays_open(worker: Worker, mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings(liveness_s=1.0)
    async with serving(worker, settings) as server:
        caller = Caller(await Channels(settings).open_stream(CONNECT, [server.stream_endpoint]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.6):
                await asyncio.shield(caller.end)
        caller.send_text("hello")
        assert await caller.text() == "hello"
        caller.stream.cancel()


async def test_a_message_over_the_limit_ends_the_call_with_the_limit() -> None:
    def echo(stream: ServerStream) -> None:
        stream.on_message = stream.send

    server: StreamServer = await serve_streams("127.0.0.1", 0, {CONNECT: echo}, silence_s=60.0, max_message_bytes=1000)
    caller = Caller(await Channels(ServiceSettings()).open_stream(CONNECT, [f"127.0.0.1:{server.port}"]))
    caller.send_text("x" * 2000)
    failure = await caller.failure()
    await server.stop(0.0)
    assert (failure.code, failure.limit) == (errors_pb2.ERROR_CODE_TOO_LARGE, "1000 bytes")


async def test_what_speaks_no_http_2_is_cut_off(worker: Worker, mesh_settings: SettingsMaker) -> None:
    async with serving(worker, mesh_settings()) as server, asyncio.timeout(BOUND_S):
        host, _, port = server.stream_endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.read()
        writer.close()


@pytest.mark.parametrize("max_frame", [0, 16383, 1 << 24])
async def test_a_peer_that_asks_for_impossible_frames_is_cut_off(
    max_frame: int, worker: Worker, mesh_settings: SettingsMaker
) -> None:
    settings = struct.pack(">HI", frames.MAX_FRAME_SIZE, max_frame)
    async with serving(worker, mesh_settings()) as server, asyncio.timeout(BOUND_S):
        host, _, port = server.stream_endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, settings))
        assert f"frames of {max_frame} bytes".encode() in await reader.read()
        writer.close()


async def test_mutual_tls_serves_members_and_refuses_strangers(
    worker: Worker, mesh_settings: SettingsMaker, certificates: dict[str, str]
) -> None:
    settings = mesh_settings(**certificates)
    async with serving(worker, settings) as server:
        for endpoint in (server.stream_endpoint, server.endpoint):
            caller = Caller(await Channels(settings).open_stream(CONNECT, [endpoint]))
            caller.send_text("hello")
            assert await caller.text() == "hello"
            caller.stream.cancel()
        for stranger in (mesh_settings(), mesh_settings(tls_ca=certificates["tls_ca"])):
            with contextlib.suppress(AioRpcError):
                caller = Caller(await Channels(stranger).open_stream(CONNECT, [server.stream_endpoint]))
                caller.send_text("hello")
                assert (await caller.failure()).code == errors_pb2.ERROR_CODE_UNAVAILABLE
        async with asyncio.timeout(BOUND_S):
            while any(isinstance(held, ServerConnection) for held in gc.get_objects()):
                await asyncio.sleep(0.02)
                gc.collect()
