"""The floor below a placement: one message on an open stream and its answer, on our streams and on gRPC's own core.

Run as a program it is the server, which answers on both of its ports and prints them.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import grpc
import uvloop

from tidemill.mesh.v1 import router_pb2, router_pb2_grpc
from tidemill.mesh.v1.router_pb2 import RouterServiceConnectRequest, RouterServiceConnectResponse
from tidemill_mesh.channels import Channels
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_mesh.streams.server import ServerStream

SERVICE = "tidemill.mesh.v1.RouterService"
CONNECT = f"{SERVICE}/Connect"
PAUSE_S = 0.002
"""Between two round trips, so that both sides sleep as they do between requests."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Medians of one way to ask."""

    round_trip_us: float
    client_processor_us: float


class _OwnCore(router_pb2_grpc.RouterServiceServicer):
    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[RouterServiceConnectRequest], context: object
    ) -> AsyncIterator[RouterServiceConnectResponse]:
        async for _request in request_iterator:
            yield RouterServiceConnectResponse()


def _answer(stream: ServerStream) -> None:
    def take(data: bytes) -> None:
        RouterServiceConnectRequest.FromString(data)
        stream.send(RouterServiceConnectResponse().SerializeToString())

    stream.on_message = take


async def _serve() -> None:
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    item = Servicer(add, _OwnCore(), SERVICE, {CONNECT: _answer})  # type: ignore[abstract]
    async with serve_grpc(ServiceSettings(), [item]) as server:
        print(server.endpoint, server.stream_endpoint, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def _server() -> Iterator[tuple[str, str]]:
    argv = [sys.executable, "-m", "tidemill_bench.stream_echo"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        endpoint, _, stream_endpoint = process.stdout.readline().strip().partition(" ")
        try:
            yield endpoint, stream_endpoint
        finally:
            process.stdin.close()


def _request() -> RouterServiceConnectRequest:
    placement = router_pb2.PlacePrefillRequest(request_id="r" * 28, block_hashes=bytes(32))
    return RouterServiceConnectRequest(calls=[router_pb2.RouterCall(id=1, place_prefill=placement)])


async def _time(ask: Callable[[], Awaitable[None]], rounds: int) -> Echo:
    for _ in range(20):
        await ask()
    times_us, before_s = [], time.process_time()
    for _ in range(rounds):
        start = time.perf_counter()
        await ask()
        times_us.append((time.perf_counter() - start) * 1e6)
        await asyncio.sleep(PAUSE_S)
    return Echo(round_trip_us=median(times_us), client_processor_us=(time.process_time() - before_s) / rounds * 1e6)


async def _measure(endpoint: str, stream_endpoint: str, rounds: int) -> tuple[Echo, Echo]:
    request = _request()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Connect()

        async def ask_core() -> None:
            await call.write(request)
            await call.read()

        core = await _time(ask_core, rounds)
        call.cancel()
    channels = Channels(ServiceSettings())
    stream = await channels.open_stream(CONNECT, [stream_endpoint])
    answered = asyncio.Event()

    def take(data: bytes) -> None:
        RouterServiceConnectResponse.FromString(data)
        answered.set()

    stream.on_message = take

    async def ask_ours() -> None:
        answered.clear()
        stream.send(request.SerializeToString())
        await answered.wait()

    ours = await _time(ask_ours, rounds)
    stream.cancel()
    await channels.close()
    return ours, core


def measure(rounds: int) -> tuple[Echo, Echo]:
    """Ours, and gRPC's own core on both ends."""
    with _server() as (endpoint, stream_endpoint), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(endpoint, stream_endpoint, rounds))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as serving:
        serving.run(_serve())
