"""The server and its channels: health, reflection, binds, TLS, and peers that freeze."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill_mesh.channels import Channels, connect
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.server import BindError, Servicer, advertised_host, is_loopback, peer_identity, serve_grpc

SettingsMaker = Callable[..., ServiceSettings]
Child = Callable[..., Awaitable[asyncio.subprocess.Process]]
NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose stream stays open, answers each ping, and says how it ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.identity = ""

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.ConnectResponse]:
        self.identity = peer_identity(context)
        try:
            async for _request in request_iterator:
                yield worker_pb2.ConnectResponse(pong=True)
        finally:
            self.ended.set()


def servicers(worker: Worker) -> list[Servicer]:
    return [Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, NAME)]


async def ping(call: Any) -> bool:
    await call.write(worker_pb2.ConnectRequest(ping=True))
    answer = await call.read()
    return answer is not grpc.aio.EOF and bool(answer.pong)


async def eventually_refused(channel: grpc.aio.Channel) -> None:
    while True:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        try:
            await ping(call)
        except grpc.aio.AioRpcError:
            return
        call.cancel()


async def test_health_follows_set_serving_for_the_process_and_each_service(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        channel = connect(server.endpoint, settings)
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            server.set_serving(True)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                continue
            server.set_serving(False)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                continue
            watch.cancel()
        await channel.close()


async def read_until(watch: Any, status: int) -> None:
    """Reads a Watch up to a status; the statuses between two may be left out."""
    while (answer := await watch.read()) is not grpc.aio.EOF:
        if answer.status == status:
            return
    raise AssertionError("the watch ended before")


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        server.set_serving(True)
        channel = connect(server.endpoint, settings)
        stub = health_pb2_grpc.HealthStub(channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        for watch in (leaving, staying):
            await read_until(watch, health_pb2.HealthCheckResponse.SERVING)
        leaving.cancel()
        # Goes the same way as the cancellation, after it.
        await stub.Check(health_pb2.HealthCheckRequest())
        server.set_serving(False)
        async with asyncio.timeout(300):
            await read_until(staying, health_pb2.HealthCheckResponse.NOT_SERVING)
        await channel.close()


async def test_a_stop_tells_those_who_watch_and_does_not_wait_for_them(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        server.set_serving(True)
        channel = connect(server.endpoint, settings)
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", NAME)]
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        for watch in watches:
            await read_until(watch, health_pb2.HealthCheckResponse.SERVING)
        await read_until(unknown, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        async with asyncio.timeout(300):
            await server.stop(600.0)
        for watch in watches:
            await read_until(watch, health_pb2.HealthCheckResponse.NOT_SERVING)
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() == grpc.StatusCode.OK
        assert await unknown.read() is grpc.aio.EOF
        server.set_serving(True)
        late = await server.health.Check(health_pb2.HealthCheckRequest(), None)  # type: ignore[arg-type]
        assert late.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await channel.close()


async def test_a_service_that_is_not_here_is_unknown_to_health(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        channel = connect(server.endpoint, settings)
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="no.such.Service")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Check(request)
        assert failed.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        server.set_serving(True)
        await stub.Check(health_pb2.HealthCheckRequest())
        assert not watch.done()
        await channel.close()


async def test_a_server_that_stops_says_so_lets_calls_finish_and_refuses_new_ones(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        server.set_serving(True)
        channel = connect(server.endpoint, settings)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        assert await ping(call)
        stopping = asyncio.ensure_future(server.stop(60.0))
        other = connect(server.endpoint, settings)
        await eventually_refused(other)
        assert await ping(call)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await stopping
        await channel.close()
        await other.close()


async def test_reflection_lists_the_services(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        channel = connect(server.endpoint, settings)
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {item.name for item in (await call.read()).list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= listed
        await channel.close()


async def test_a_quiet_stream_outlives_many_pings(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings(liveness_s=1.0)
    async with serve_grpc(settings, servicers(Worker())) as server:
        channel = connect(server.endpoint, settings)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        assert await ping(call)
        await asyncio.sleep(4.5)
        assert await ping(call)
        call.cancel()
        await channel.close()


FROZEN_SERVER = """
import asyncio, sys
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.server import Servicer, serve_grpc

class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Connect(self, requests, context):
        async for _ in requests:
            yield worker_pb2.ConnectResponse(pong=True)

async def main():
    worker = Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Worker(), "x")
    async with serve_grpc(ServiceSettings(liveness_s=0.6), [worker]) as server:
        print(server.endpoint, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
FROZEN_CLIENT = """
import asyncio, sys
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill_mesh.channels import connect
from tidemill_mesh.config import ServiceSettings

async def main():
    channel = connect(sys.argv[1], ServiceSettings(liveness_s=0.6))
    call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
    await call.write(worker_pb2.ConnectRequest(ping=True))
    await call.read()
    print("connected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_a_frozen_server_ends_the_callers_stream(mesh_settings: SettingsMaker, child: Child) -> None:
    process = await child(FROZEN_SERVER)
    channel = connect(await first_line(process), mesh_settings(liveness_s=0.6))
    call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
    assert await ping(call)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_a_frozen_client_ends_its_call_in_the_server(mesh_settings: SettingsMaker, child: Child) -> None:
    worker = Worker()
    async with serve_grpc(mesh_settings(liveness_s=0.6), servicers(worker)) as server:
        process = await child(FROZEN_CLIENT, server.endpoint)
        assert await first_line(process) == "connected"
        os.kill(process.pid, signal.SIGSTOP)
        await worker.ended.wait()


async def test_a_port_in_use_is_refused_by_name(mesh_settings: SettingsMaker) -> None:
    async with serve_grpc(mesh_settings(), []) as server:
        with pytest.raises(BindError, match=str(server.port)):
            async with serve_grpc(mesh_settings(port=server.port), []):
                pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "tidemill.example"])
async def test_a_bind_that_others_reach_needs_tls_or_consent(host: str, mesh_settings: SettingsMaker) -> None:
    with pytest.raises(BindError, match="insecure=true"):
        async with serve_grpc(mesh_settings(host=host), []):
            pass


async def test_consent_allows_a_wildcard_bind_and_advertises_a_real_name(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings(host="0.0.0.0", insecure=True)
    async with serve_grpc(settings, []) as server:
        assert not server.endpoint.startswith("0.0.0.0")
    assert advertised_host(mesh_settings(host="0.0.0.0", advertise_host="worker-1")) == "worker-1"


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a.b", False)]
)
def test_loopback_is_recognised(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_half_a_tls_pair_is_refused(mesh_settings: SettingsMaker) -> None:
    with pytest.raises(BindError, match="tls_key"):
        async with serve_grpc(mesh_settings(tls_cert="cert.pem"), []):
            pass


async def test_mutual_tls_proves_who_calls_and_refuses_who_cannot(
    mesh_settings: SettingsMaker, certificates: dict[str, str]
) -> None:
    worker = Worker()
    settings = mesh_settings(**certificates)
    async with serve_grpc(settings, servicers(worker)) as server:
        channels = Channels(settings)
        assert await ping(worker_pb2_grpc.WorkerServiceStub(channels.get(server.endpoint)).Connect())
        assert worker.identity == "worker-1"
        await channels.close()
        for stranger in (mesh_settings(), mesh_settings(tls_ca=certificates["tls_ca"])):
            channel = connect(server.endpoint, stranger)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ping(worker_pb2_grpc.WorkerServiceStub(channel).Connect())
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
            await channel.close()


async def test_channels_are_kept_until_forgotten_and_running_calls_outlive_that(mesh_settings: SettingsMaker) -> None:
    settings = mesh_settings()
    async with serve_grpc(settings, servicers(Worker())) as server:
        channels = Channels(settings)
        channel = channels.get(server.endpoint)
        assert channels.get(server.endpoint) is channel
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        assert await ping(call)
        channels.forget(server.endpoint)
        channels.forget(server.endpoint)
        assert channels.get(server.endpoint) is not channel
        assert await ping(call)
        await channels.close()
        assert await call.code() == grpc.StatusCode.CANCELLED
