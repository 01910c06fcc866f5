"""Real etcd, NATS, checkpoints and worker processes for the tests of the worker."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from harness.oracle_checkpoints import CONFIGS, make_oracle

from tidemill_local.home import Home
from tidemill_local.models import run_loader
from tidemill_local.processes import ProcessRecord, kill, wait_gone
from tidemill_local.servers import start_etcd, start_nats

sys.path.insert(0, str(Path(__file__).parent))

from gateway_rig import GatewayRig
from worker_rig import Connect, Servers, StartWorker, WorkerProcess


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a tiny random checkpoint by architecture, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(architecture: str) -> Path:
        folder = root / f"tiny-{architecture}"
        if folder.exists():
            return folder
        if architecture in CONFIGS:
            return make_oracle(architecture, folder)
        run_loader("tiny", "--architecture", architecture, "--out", str(folder))
        return folder

    return get


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """An etcd and a NATS; tests keep apart by the names of their instances."""
    home = Home(tmp_path_factory.mktemp("servers"))
    home.prepare()
    with ExitStack() as stack:
        etcd, etcd_port = start_etcd(home, "127.0.0.1")
        stack.callback(_end, etcd)
        nats, nats_port = start_nats(home, "127.0.0.1")
        stack.callback(_end, nats)
        yield Servers(home, f"127.0.0.1:{etcd_port}", f"nats://127.0.0.1:{nats_port}")


@pytest.fixture(scope="module")
def start_worker(servers: Servers, checkpoints: Callable[[str], Path]) -> Iterator[StartWorker]:
    """Starts worker processes that live until the module's tests are over: start_worker("prefill", "p-1", ...)."""
    started: list[WorkerProcess] = []

    def start(service: str, instance: str, architecture: str = "llama", **settings: object) -> WorkerProcess:
        worker = WorkerProcess(servers, service, instance, model=checkpoints(architecture), **settings)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def connect() -> Connect:
    """Connects a gateway to a worker for the length of a block: async with connect(worker) as gateway."""

    @asynccontextmanager
    async def open_rig(worker: WorkerProcess) -> AsyncIterator[GatewayRig]:
        async with GatewayRig(await asyncio.to_thread(worker.wait_ready)) as rig:
            yield rig

    return open_rig


def _end(record: ProcessRecord) -> None:
    kill(record)
    assert wait_gone(record, 60.0)
