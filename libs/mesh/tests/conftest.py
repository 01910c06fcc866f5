"""Real etcd and NATS servers for the tests of the mesh, killed, frozen and restarted at will."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from tidemill_local.ports import free_port
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.metrics import Metrics

SCRIPTS = Path(sysconfig.get_path("scripts"))
# Against hangs only.
START_S = 300.0


@dataclass
class LocalServer:
    """One server process on a fixed loopback port, with its state in a folder."""

    name: str
    folder: Path
    port: int = field(default_factory=free_port)
    more_ports: tuple[int, ...] = field(default_factory=lambda: (free_port(),))
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        """Its command line."""
        if self.name == "nats-server":
            return [str(SCRIPTS / "nats-server"), "-a", "127.0.0.1", "-p", str(self.port)]
        etcd = shutil.which("etcd") or str(SCRIPTS / "etcd")
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{self.more_ports[0]}"
        urls = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        cluster = ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        return [etcd, "--data-dir", str(self.folder / "data"), *urls, *cluster, "--log-level", "error"]

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self.folder / f"{self.name}.log").open("ab") as output:
            self.process = subprocess.Popen(self.argv(), stdout=output, stderr=output)
        deadline = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None, (self.folder / f"{self.name}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.name} does not answer"
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether a client could use it now."""
        try:
            if self.name == "etcd":
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=1.0) as answer:
                    return b'"true"' in answer.read()
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal; a killed one is waited for."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def forget_data(self) -> None:
        """Deletes its state; it must not run."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def stop(self) -> None:
        """Ends it, frozen or not."""
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGKILL)


def run_server(name: str, folder: Path) -> Iterator[LocalServer]:
    server = LocalServer(name, folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An authority and one certificate for localhost, named worker-1, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")
    names = {name: str(folder / name) for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "cert.csr")}

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-subj", "/CN=ca", "-keyout", names["ca.key"], "-out", names["ca.pem"])
    openssl("req", *curve, "-subj", "/CN=worker-1", "-keyout", names["cert.key"], "-out", names["cert.csr"])
    (folder / "extension").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ["-CA", names["ca.pem"], "-CAkey", names["ca.key"], "-CAcreateserial", "-out", names["cert.pem"]]
    openssl("x509", "-req", "-in", names["cert.csr"], *signed, "-extfile", str(folder / "extension"))
    return {"tls_cert": names["cert.pem"], "tls_key": names["cert.key"], "tls_ca": names["ca.pem"]}


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """An etcd that no test may harm; tests keep apart by their mesh name."""
    yield from run_server("etcd", tmp_path_factory.mktemp("etcd"))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A NATS that no test may harm."""
    yield from run_server("nats-server", tmp_path_factory.mktemp("nats"))


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[LocalServer]:
    """An etcd of the test's own."""
    yield from run_server("etcd", tmp_path)


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[LocalServer]:
    """A NATS of the test's own."""
    yield from run_server("nats-server", tmp_path)


@pytest.fixture
def dead_address() -> str:
    """An address where nobody listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def mesh_settings(request: pytest.FixtureRequest) -> Callable[..., ServiceSettings]:
    """Makes settings with a mesh name of the test's own.

    Tests in which a loss is to be noticed say liveness_s=SHORT_S; to the others nothing may be lost by a machine that
    runs one side, or both, seconds later.
    """
    mesh = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())[:60]

    def make(**changes: Any) -> ServiceSettings:
        values = {"mesh": mesh, "liveness_s": 30.0, "etcd": "127.0.0.1:1", "nats": "nats://127.0.0.1:1", **changes}
        return ServiceSettings(**values)

    return make


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of a process named like the test."""
    return Metrics("gateway", "test")


@pytest.fixture
def value_of() -> Callable[[Metrics, str], float]:
    """Reads the sum of a metric's samples."""

    def read(metrics: Metrics, name: str) -> float:
        wanted = f"tidemill_gateway_{name}"
        samples = [sample for family in metrics.registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == wanted)

    return read


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Undoes what a test does to this process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
async def child() -> AsyncIterator[Callable[..., Awaitable[asyncio.subprocess.Process]]]:
    """Starts a Python program whose output can be read; killed at the end of the test."""
    started: list[asyncio.subprocess.Process] = []

    async def start(source: str, *arguments: str) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-c", source, *arguments]
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Waits until a condition holds; the test's timeout is its only limit."""

    async def wait(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    return wait
