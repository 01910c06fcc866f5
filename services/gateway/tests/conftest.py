import asyncio
import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from gateway_emulated import TEXT, Answer, Assets, EmulatedWorker, canned, new_worker, serving, tiny_assets

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_gateway.service import serve
from tidemill_gateway.settings import GatewaySettings
from tidemill_local.ports import free_port
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.drain import Drain
from tidemill_mesh.service import open_context


def _binary(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is needed for these tests"
    return found


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}")


@contextlib.contextmanager
def _process(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def gateway_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Real etcd and NATS: (etcd endpoint, NATS address)."""
    etcd, peer, nats = free_port(), free_port(), free_port()
    client_url, peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
    etcd_argv = [
        _binary("etcd"), "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--unsafe-no-fsync",
        "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
        "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url,
        "--initial-cluster", f"default={peer_url}",
    ]  # fmt: skip
    with _process(etcd_argv), _process([_binary("nats-server"), "-a", "127.0.0.1", "-p", str(nats)]):
        _wait_for_port(etcd)
        _wait_for_port(nats)
        yield f"127.0.0.1:{etcd}", f"nats://127.0.0.1:{nats}"


@dataclass
class EmulatedMesh:
    """A gateway in this process in front of emulated workers."""

    settings: GatewaySettings
    stack: contextlib.AsyncExitStack
    assets: Assets
    answer: Answer
    fleet: dict[str, EmulatedWorker] = field(default_factory=dict)
    grpc_endpoint: str = ""
    http: str = ""
    drain: Drain | None = None
    task: asyncio.Task[None] | None = None
    context: Any = None

    async def add(self, role: int, assets: Assets | None = None, **fields: Any) -> EmulatedWorker:
        worker = new_worker(role, assets or self.assets, self.answer, self.fleet)
        for name, value in fields.items():
            setattr(worker, name, value)
        mesh = ServiceSettings(
            mesh=self.settings.mesh,
            etcd=self.settings.etcd,
            nats=self.settings.nats,
            instance=worker.instance,
            liveness_s=self.settings.liveness_s,
        )
        return await self.stack.enter_async_context(serving(worker, mesh))

    async def start_gateway(self) -> None:
        self.drain = Drain(self.settings.drain_s)
        context = await self.stack.enter_async_context(
            open_context("gateway", f"gateway-{secrets.token_hex(3)}", self.settings, self.drain)
        )
        self.context = context
        published: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

        async def publish(endpoint: str, http_endpoint: str = "", **more: str) -> None:
            published.set_result((endpoint, http_endpoint))

        context.publish_run_file = publish  # type: ignore[method-assign]
        self.task = asyncio.create_task(serve(context))
        self.stack.push_async_callback(self.stop_gateway)
        await asyncio.wait([self.task, published], return_when="FIRST_COMPLETED")
        if self.task.done():
            self.task.result()
        self.grpc_endpoint, http = published.result()
        self.http = f"http://{http}"

    async def until_ready(self) -> None:
        """Until the gateway's model can be used."""
        async with httpx2.AsyncClient(timeout=120) as client, asyncio.timeout(120):
            while (await client.get(f"{self.http}/ready")).status_code != 200:
                await asyncio.sleep(0.01)

    async def stop_gateway(self) -> None:
        assert self.drain is not None
        assert self.task is not None
        self.drain.request()
        await self.task

    async def until(self, condition: Any, bound_s: float = 120.0) -> None:
        async with asyncio.timeout(bound_s):
            while not condition():
                await asyncio.sleep(0.01)

    def holds(self) -> int:
        return sum(worker.holds for worker in self.fleet.values())


@contextlib.asynccontextmanager
async def _opened(servers: tuple[str, str]) -> AsyncIterator[EmulatedMesh]:
    etcd, nats = servers
    settings = GatewaySettings(
        mesh=f"test-{secrets.token_hex(4)}", etcd=etcd, nats=nats, port=0, http_api_port=0, liveness_s=2.5, drain_s=60.0
    )
    async with contextlib.AsyncExitStack() as stack:
        yield EmulatedMesh(settings, stack, tiny_assets(), canned(TEXT))


async def _with_a_pair(mesh: EmulatedMesh) -> EmulatedMesh:
    await mesh.add(ROLE_PREFILL)
    await mesh.add(ROLE_DECODE)
    await mesh.start_gateway()
    await mesh.until_ready()
    return mesh


@pytest.fixture
async def bare_mesh(gateway_servers: tuple[str, str]) -> AsyncIterator[EmulatedMesh]:
    """A mesh without processes: the test starts what it needs."""
    async with _opened(gateway_servers) as mesh:
        yield mesh


@pytest.fixture
async def emulated_mesh(bare_mesh: EmulatedMesh) -> EmulatedMesh:
    """A gateway, one emulated prefill worker, one emulated decode worker."""
    return await _with_a_pair(bare_mesh)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(gateway_servers: tuple[str, str]) -> AsyncIterator[EmulatedMesh]:
    """The same for all tests of a module."""
    async with _opened(gateway_servers) as mesh:
        yield await _with_a_pair(mesh)
