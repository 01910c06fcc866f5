"""A cluster whose lines may be cut, to NATS, to etcd and into a namespace, and whose clock and disk obey a test."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.wave import MakeWave, Wave
from harness.fixtures import Checkpoint, kept
from harness.network import Line, NotPermitted, lined_namespace
from harness.oracle import Oracle
from harness.pairs import SETTINGS
from harness.preloaded import NoCompiler, Preloaded
from harness.proxy import SharedLine, shared_line
from harness.running import RunningCluster

from tidemill_local.ports import free_port

SERVERS = ("nats", "etcd")
APART = Path(__file__).with_name("apart.py")
# What each request costs that meets the rank's cut line.
TRANSFER_TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def namespace() -> Iterator[Line | str]:
    """A namespace and the line to it, or why there is none."""
    try:
        with lined_namespace() as made:
            yield made
    except NotPermitted as error:
        yield str(error)


@pytest.fixture
def line(namespace: Line | str) -> Line:
    """The line, or no test."""
    if isinstance(namespace, str):
        pytest.skip(f"no network namespaces here: {namespace}")
    return namespace


@pytest.fixture(scope="module")
def host(namespace: Line | str) -> str:
    """The near end of the line, where there is one."""
    return namespace.near if isinstance(namespace, Line) else "127.0.0.1"


@pytest.fixture(scope="module")
def ports(host: str) -> dict[str, int]:
    return {server: free_port(host) for server in SERVERS}


@pytest.fixture(scope="module")
def servers(host: str, ports: dict[str, int]) -> Iterator[dict[str, SharedLine]]:
    """The lines by which all services reach NATS and etcd."""
    with shared_line(f"{host}:{ports['nats']}", host) as nats, shared_line(f"{host}:{ports['etcd']}", host) as etcd:
        yield {"nats": nats, "etcd": etcd}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded | str]:
    """In each process that the module starts from now on but etcd and NATS, which need no C library; or why in none."""
    try:
        made = Preloaded(tmp_path_factory.mktemp("preloaded"))
    except NoCompiler as error:
        yield str(error)
        return
    with pytest.MonkeyPatch.context() as environment:
        for name, value in made.environment.items():
            environment.setenv(name, value)
        yield made


@pytest.fixture
def shim(library: Preloaded | str) -> Iterator[Preloaded]:
    """The library, or no test; afterwards clock and disk are right again."""
    if isinstance(library, str):
        pytest.skip(library)
    yield library
    library.set_clock(0.0)
    library.slow_disk(0.0)


@pytest.fixture(scope="module")
def spread_cluster(
    checkpoint: Checkpoint, host: str, ports: dict[str, int], servers: dict[str, SharedLine], library: Preloaded | str
) -> Iterator[RunningCluster]:
    """A cluster that listens at the near end of the line, and leans on servers behind lines of their own."""
    lines = {"etcd": servers["etcd"].address, "nats": f"nats://{servers['nats'].address}"}
    settings = {**SETTINGS, "all": {**SETTINGS["all"], "insecure": True, **lines}}
    numbers = {f"{server}_port": port for server, port in ports.items()}
    spec: dict[str, Any] = {"prefill": 2, "decode": 2, "gateways": 2, **numbers}
    made = RunningCluster.start(checkpoint("llama"), host=host, settings=settings, **spec)
    with kept(made):
        yield made


@pytest.fixture
def spread(
    spread_cluster: RunningCluster, namespace: Line | str, servers: dict[str, SharedLine], library: Preloaded | str
) -> RunningCluster:
    """Whole: each test leaves it so, and what a failed one left cut or behind the line comes home."""
    if isinstance(namespace, Line):
        namespace.mend()
    for server in servers.values():
        server.mend()
    if isinstance(library, Preloaded):
        library.set_clock(0.0)
        library.slow_disk(0.0)
    spread_cluster.mend()
    return spread_cluster


@pytest.fixture
def spread_wave(spread: RunningCluster, oracle: Oracle, request: pytest.FixtureRequest) -> MakeWave:
    """Makes waves of prompts that are new to this cluster."""
    made = 0

    def make(streams: int = 12, output_tokens: int = 100, **options: Any) -> Wave:
        nonlocal made
        made += 1
        return Wave(spread, *oracle.cases(f"{request.node.name}/{made}", streams, 300, output_tokens), **options)

    return make


@asynccontextmanager
async def moved(spread: RunningCluster, line: Line, victim: str, argv: Sequence[str]) -> AsyncIterator[None]:
    """The victim runs so, in whole or in part behind the line, which is mended after the block."""
    await asyncio.to_thread(spread.replace, victim, argv)
    await spread.until_members(*(name for _, name in spread.spec.instances()))
    try:
        yield
    finally:
        line.mend()


def behind(spread: RunningCluster, line: Line, victim: str) -> AbstractAsyncContextManager[None]:
    """The whole victim is behind the line for the length of the block."""
    return moved(spread, line, victim, line.inside(spread.cluster.record(victim).argv))


def rank_behind(spread: RunningCluster, line: Line, victim: str, *more: str) -> AbstractAsyncContextManager[None]:
    """A worker's rank alone is behind the line for the length of the block."""
    _, _, _, *flags = spread.cluster.record(victim).argv
    where = [victim.partition("-")[0], line.namespace, line.far]
    argv = [sys.executable, str(APART), *where, *flags, f"--transfer-timeout-s={TRANSFER_TIMEOUT_S}", *more]
    return moved(spread, line, victim, argv)
