"""Real etcd, NATS and kvstore processes; the test process is the worker."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import grpc
import pytest
from moto.server import ThreadedMotoServer

from tidemill.mesh.v1 import kvstore_pb2_grpc, worker_pb2_grpc
from tidemill_local import processes, servers
from tidemill_local.home import Home
from tidemill_mesh.config import ServiceSettings
from tidemill_transfer.agent import TransferAgent, open_agent

# Against hangs only: a slow machine may take minutes to start a process.
START_S = 540.0
MIB = 1 << 20
SMALL = {
    "capacity_bytes": 64 * MIB,
    "segment_bytes": MIB,
    "inflight_bytes": 4 * MIB,
    "max_message_bytes": MIB,
    "max_waiting": 20,
}


class KvStoreProcess:
    """`python -m tidemill_kvstore` with its state in a folder."""

    def __init__(self, folder: Path, settings: ServiceSettings, **changes: Any) -> None:
        self.folder = folder
        self.instance = "kvstore-1"
        values = {
            "instance": self.instance,
            "mesh": settings.mesh,
            "etcd": settings.etcd,
            "nats": settings.nats,
            "run-dir": folder / "run",
            "data-dir": folder / "data",
            "liveness-s": settings.liveness_s,
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        self.argv = [sys.executable, "-m", "tidemill_kvstore", *(f"--{name}={value}" for name, value in values.items())]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> str:
        """Starts it and waits until it is ready; its gRPC endpoint."""
        run_file = self.folder / "run" / f"{self.instance}.json"
        run_file.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while not run_file.exists():
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < end, self.log[-3000:]
            time.sleep(0.05)
        endpoint: str = json.loads(run_file.read_text())["endpoint"]
        return endpoint

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(timeout=300)


@pytest.fixture(scope="session")
def mesh_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(etcd, nats) addresses."""
    home = Home(tmp_path_factory.mktemp("servers"))
    home.prepare()
    with ExitStack() as stack:
        etcd, etcd_port = servers.start_etcd(home, "127.0.0.1")
        stack.callback(processes.stop, etcd, run_dir=home.run, grace_s=60.0)
        nats, nats_port = servers.start_nats(home, "127.0.0.1")
        stack.callback(processes.stop, nats, run_dir=home.run, grace_s=60.0)
        for port in (etcd_port, nats_port):
            end = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < end, "a server does not answer"
                    time.sleep(0.05)
        yield f"127.0.0.1:{etcd_port}", f"nats://127.0.0.1:{nats_port}"


@pytest.fixture(scope="session")
def shared_kvstore(
    tmp_path_factory: pytest.TempPathFactory, mesh_servers: tuple[str, str]
) -> Iterator[tuple[KvStoreProcess, str, ServiceSettings]]:
    """(process, endpoint, settings of its mesh) of a small kvstore that no test may harm."""
    settings = ServiceSettings(mesh="shared", liveness_s=6.0, etcd=mesh_servers[0], nats=mesh_servers[1])
    kvstore = KvStoreProcess(tmp_path_factory.mktemp("shared"), settings, transport="tcp", **SMALL)
    yield kvstore, kvstore.start(), settings
    assert kvstore.end(signal.SIGTERM) == 0, kvstore.log[-3000:]
    assert "Traceback" not in kvstore.log, kvstore.log[-3000:]


@pytest.fixture(scope="session", params=["rclone", "moto"])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an S3 server on this machine: one that keeps objects on a disk and checks signatures, and an emulator of
    S3's own answers."""
    with rclone_server(tmp_path_factory.mktemp("s3")) if request.param == "rclone" else moto_server() as url:
        yield url


@contextmanager
def rclone_server(folder: Path) -> Iterator[str]:
    """`rclone serve s3` over a folder, as a process."""
    (folder / "objects").mkdir()
    argv = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", str(folder / "objects"), "--config="]
    argv += ["--addr=127.0.0.1:0", "--auth-key=kvstore,secret", "--cache-dir", str(folder / "cache")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while not (started := re.search(r"http://127\.0\.0\.1:\d+", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < end, "the S3 server does not start"
            time.sleep(0.02)
        yield started[0]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def moto_server() -> Iterator[str]:
    """Moto, in a thread."""
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def make_bucket(s3_server: str) -> Callable[[str], None]:
    """Makes a bucket on the S3 server."""

    client = boto3.client(
        "s3", "us-east-1", endpoint_url=s3_server, aws_access_key_id="kvstore", aws_secret_access_key="secret"
    )

    def make(name: str) -> None:
        client.create_bucket(Bucket=name)

    return make


@pytest.fixture
def mesh_settings(mesh_servers: tuple[str, str], request: pytest.FixtureRequest) -> ServiceSettings:
    """A mesh of the test's own."""
    mesh = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())[:60]
    return ServiceSettings(mesh=mesh, liveness_s=6.0, etcd=mesh_servers[0], nats=mesh_servers[1])


@pytest.fixture
def start_kvstore(tmp_path: Path, mesh_settings: ServiceSettings) -> Iterator[Callable[..., KvStoreProcess]]:
    """Starts kvstores on one folder, one after the other."""
    started: list[KvStoreProcess] = []

    def start(**changes: Any) -> KvStoreProcess:
        started.append(KvStoreProcess(tmp_path, mesh_settings, **{"transport": "tcp", **changes}))
        return started[-1]

    yield start
    for kvstore in started:
        if kvstore.process is not None:
            kvstore.end()


@pytest.fixture
async def agent() -> AsyncIterator[TransferAgent]:
    """The worker's agent."""
    opened = await open_agent("tcp", "127.0.0.1")
    yield opened
    await opened.close()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], tuple[Any, Any]]]:
    """Stubs of (KvStoreService, WorkerService) for an endpoint."""
    channels: list[grpc.aio.Channel] = []

    def stubs(endpoint: str) -> tuple[Any, Any]:
        channels.append(grpc.aio.insecure_channel(endpoint))
        return kvstore_pb2_grpc.KvStoreServiceStub(channels[-1]), worker_pb2_grpc.WorkerServiceStub(channels[-1])

    yield stubs
    for channel in channels:
        await channel.close()
