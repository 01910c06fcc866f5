"""What killed workers leave behind is gone after a lease: records, index entries, connections, processes, folders."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_owner import BLOCKS
from gateway_rig import GatewayRig
from worker_rig import Servers

from tidemill_local.mesh_view import look
from tidemill_local.processes import kill, stat
from tidemill_local.servers import launch
from tidemill_local.spec import Addresses, flags
from tidemill_mesh.owned_folders import sweep

pytestmark = pytest.mark.full

MESH = "killed"
ROUNDS, AT_ONCE = 4, 5
WAIT_S = 300.0
FORKED = Path(__file__).with_name("forked_workers.py")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for temporary files of all processes of the test."""
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
    tempfile.tempdir = None


class Mesh:
    """A router and a kvstore that live through the test, and workers that do not."""

    def __init__(self, servers: Servers, model: Path, temporary: Path) -> None:
        self._servers, self._temporary = servers, temporary
        common = {"etcd": servers.etcd, "nats": servers.nats, "run_dir": str(servers.home.run), "liveness_s": 1.0}
        common["mesh"] = MESH
        self._worker = common | {"model": str(model), "l2_memory_bytes": 1 << 20, "l2_policy": "write_through"}
        self._worker |= {"transport": "tcp", "port": 0, "stream_port": 0, "http_port": 0}
        more = {"router": {}, "kvstore": {"data_dir": str(temporary / "store"), "transport": "tcp"}}
        self.standing = []
        for name, given in more.items():
            argv = [sys.executable, "-m", f"tidemill_{name}", *flags(common | given | {"instance": f"{name}-k"})]
            self.standing.append(launch(f"{name}-k", argv, servers.home))
        log = str(temporary / "workers.log")
        self._forks = subprocess.Popen(
            [sys.executable, str(FORKED), log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[int] = []

    def start_worker(self, instance: str) -> int:
        """The process id of a worker that starts now."""
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps(self._worker | {"instance": instance}) + "\n")
        self._forks.stdin.flush()
        self.pids.append(int(self._forks.stdout.readline()))
        return self.pids[-1]

    def end(self) -> None:
        """Ends all of it."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for record in self.standing:
            kill(record)
        self._forks.kill()
        self._forks.communicate()

    def said(self, instance: str) -> dict[str, Any]:
        """What an instance says of itself in its file."""
        return dict(json.loads((self._servers.home.run / f"{instance}.json").read_text()))

    def metric(self, instance: str, name: str) -> float:
        """A metric of an instance, 0 while it is not shown."""
        with urllib.request.urlopen(f"http://{self.said(instance)['http_endpoint']}/metrics", timeout=300) as answer:
            found = re.search(rf"^\w+_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def connections(self) -> dict[str, int]:
        """Connections that etcd, NATS and the kvstore have from others."""
        ends = {"etcd": self._servers.etcd, "nats": self._servers.nats, "kvstore": self.said("kvstore-k")["endpoint"]}
        ports = {int(end.rpartition(":")[2]): name for name, end in ends.items()}
        counted = dict.fromkeys(ends, 0)
        # gRPC's sockets are of IPv6, also for IPv4.
        lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        for line in lines:
            _, local, _, state = line.split()[:4]
            name = ports.get(int(local.rpartition(":")[2], 16))
            if name and state == "01":
                counted[name] += 1
        return counted

    async def members(self) -> set[str]:
        """Instances that are registered."""
        return set((await look(Addresses(self._servers.etcd, self._servers.nats), mesh=MESH)).members)

    def folders(self) -> int:
        """Folders of workers, in use or left behind."""
        return len(list(self._temporary.glob("*tidemill-*")))

    def ranks(self) -> list[int]:
        """Rank processes of this test's workers."""
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if str(self._temporary).encode() in _read(path) and b"emulated_owner" in _read(path)
        ]


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


async def until(what: str, condition: Callable[[], bool]) -> None:
    """Waits; the failure says what for."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S:.0f} s: {what}") from None


async def until_members(mesh: Mesh, wanted: set[str]) -> None:
    """Waits until exactly these are registered."""
    async with asyncio.timeout(WAIT_S):
        while await mesh.members() != wanted:
            await asyncio.sleep(0.1)


async def own_something(mesh: Mesh, instance: str) -> None:
    """Leaves a worker with a request and a ticket of it."""
    async with GatewayRig(mesh.said(instance)["endpoint"], name=f"gateway-{instance}") as rig:
        rig.submit("held", list(range(40)), "PREFILL")
        await rig.ticket("held", rig)
        holds = dict((await rig.status()).holds)
        assert holds["tickets"] == 1


async def test_twenty_killed_workers_leave_nothing(
    servers: Servers, checkpoints: Callable[[str], Path], temporary: Path
) -> None:
    mesh = Mesh(servers, checkpoints("llama"), temporary)
    standing, workers = {"router-k", "kvstore-k"}, [f"owner-{i}" for i in range(AT_ONCE)]
    try:
        await until_members(mesh, standing)
        await until("the router's file", lambda: (servers.home.run / "router-k.json").exists())
        before = mesh.connections()
        joined = {name: count + AT_ONCE for name, count in before.items()}
        for _ in range(ROUNDS):
            for instance in workers:
                (servers.home.run / f"{instance}.json").unlink(missing_ok=True)
            pids = [mesh.start_worker(instance) for instance in workers]
            await until("all workers", lambda: all((servers.home.run / f"{i}.json").exists() for i in workers))
            await asyncio.gather(*(own_something(mesh, instance) for instance in workers))
            assert await mesh.members() == standing | set(workers)
            await until(
                "their blocks in the index", lambda: mesh.metric("router-k", "index_blocks") >= AT_ONCE * BLOCKS
            )
            await until("puts that never end", lambda: mesh.metric("kvstore-k", "inflight_bytes") > 0)
            await until("their connections", lambda: all(mesh.connections()[name] >= joined[name] for name in joined))
            # Those of this round; what the one before left has gone with its start.
            assert mesh.folders() == AT_ONCE
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        await until_members(mesh, standing)
        await until("an empty index", lambda: mesh.metric("router-k", "index_blocks") == 0)
        await until("no puts", lambda: mesh.metric("kvstore-k", "inflight_bytes") == 0)
        await until(
            "no connections of the dead", lambda: all(mesh.connections()[name] <= before[name] for name in before)
        )
        await until("no ranks", lambda: mesh.ranks() == [])
        assert all(stat(pid) is None or stat(pid).dead for pid in mesh.pids)
        assert sweep() == AT_ONCE
        assert mesh.folders() == 0
    finally:
        mesh.end()
