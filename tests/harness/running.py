"""A cluster under test: a LocalCluster with what tests ask and do beyond starting and stopping."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.client import Client
from tidemill_local import health, processes, servers
from tidemill_local.cluster import LocalCluster, running_addresses
from tidemill_local.home import Home
from tidemill_local.mesh_view import MeshView, look
from tidemill_local.processes import ProcessRecord
from tidemill_local.spec import ClusterSpec, Setting, service_argv

# Small and quick, but nothing that changes behaviour: real UCX, real servers, all services.
TEST_SETTINGS: dict[str, dict[str, Setting]] = {
    "all": {"liveness_s": 2.0, "drain_s": 10.0},
    "prefill": {"torch_threads": 1, "kv_memory_bytes": 32 << 20, "max_num_seqs": 16},
    "decode": {"torch_threads": 1, "kv_memory_bytes": 32 << 20, "max_num_seqs": 16},
}
# A start compiles the native kernel once, beside all else that a busy machine does.
START_TIMEOUT_S = 600.0
POLL_S = 0.1
# Beyond the drain, for a process to close what it opened.
END_S = 60.0


class RunningCluster:
    """A started cluster in a home of its own, with real ports and processes."""

    def __init__(self, spec: ClusterSpec, home: Home, cluster: LocalCluster) -> None:
        self.spec, self.home, self.cluster = spec, home, cluster
        self.model = spec.served_name

    @classmethod
    def start(cls, model: Path, *, settings: Mapping[str, Mapping[str, Setting]] = {}, **spec: Any) -> "RunningCluster":
        """Starts and waits until it is usable; settings by service are laid over the quick ones of tests."""
        services = {**TEST_SETTINGS, **settings}
        merged = {name: {**TEST_SETTINGS.get(name, {}), **settings.get(name, {})} for name in services}
        ports = {"grpc_port": 0, "http_port": 0, "spare_workers": 0}
        wanted = ClusterSpec(model=str(model), settings=merged, **{**ports, **spec})
        # A short path: unix sockets below it may have 107 characters.
        home = Home(Path(tempfile.mkdtemp(prefix="tm-")))
        cluster = LocalCluster(home, wanted, timeout_s=START_TIMEOUT_S, say=lambda _: None)
        made = cls(wanted, home, cluster)
        try:
            cluster.up()
        except BaseException:
            made.remove()
            raise
        return made

    def remove(self) -> None:
        """Stops all and removes the home."""
        for record in self.cluster.running():
            # A test may have left something frozen.
            processes.send(record, signal.SIGCONT)
        self.cluster.down(grace_s=5.0)
        shutil.rmtree(self.home.root, ignore_errors=True)

    # -- where --------------------------------------------------------------------------------------------------

    @property
    def grpc(self) -> str:
        """host:port of the first gateway's gRPC."""
        return self.cluster.endpoint("gateway-1")

    @property
    def http(self) -> str:
        """host:port of the first gateway's OpenAI HTTP."""
        return self.cluster.http_endpoint("gateway-1")

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"http://{self.http}/v1"

    @property
    def etcd(self) -> str:
        """host:port of etcd."""
        return running_addresses(self.home).etcd

    @property
    def nats(self) -> str:
        """URL of NATS."""
        return running_addresses(self.home).nats

    def endpoint_now(self, instance: str) -> str | None:
        """host:port of an instance's gRPC, None while it does not say."""
        with contextlib.suppress(KeyError):
            return self.cluster.endpoint(instance)
        return None

    def client(self, gateway: str = "gateway-1") -> Client:
        """The embedder's client of a gateway; an async context manager."""
        return Client(self.cluster.endpoint(gateway))

    # -- do -----------------------------------------------------------------------------------------------------

    def kill(self, name: str, signum: int = signal.SIGKILL) -> ProcessRecord:
        """Signals one process: a service instance, "etcd" or "nats"."""
        return self.cluster.kill(name, signum)

    def restart(self, name: str, *, wait: bool = True) -> ProcessRecord:
        """Starts a killed process again, with the same command line."""
        return self.cluster.restart(name, wait=wait)

    def replace(self, instance: str, argv: Sequence[str] | None = None) -> ProcessRecord:
        """What a rollout does to one instance: SIGTERM, wait until it has drained, start it again (with this argv)."""
        old = self.cluster.kill(instance, signal.SIGTERM)
        limit_s = float(self.spec.settings["all"]["drain_s"]) + END_S
        assert processes.wait_gone(old, limit_s), f"{instance} did not end within {limit_s:.0f} s of SIGTERM"
        return self.start_as(instance, argv or old.argv)

    def start_as(self, instance: str, argv: Sequence[str]) -> ProcessRecord:
        """Starts an instance that does not run with this command line, and waits until it is healthy."""
        record = servers.launch(instance, argv, self.home)
        health.wait_for(record, "healthy", lambda: health.service_ok(self.home, record), START_TIMEOUT_S)
        return record

    def mend(self) -> None:
        """Whole again, as started: what a failed test froze goes on, what it left dead or changed is replaced."""
        for record in self.cluster.running():
            processes.send(record, signal.SIGCONT)
        addresses = running_addresses(self.home)
        for service, instance in self.spec.instances():
            argv = service_argv(self.spec, self.home, addresses, service, instance)
            if self.cluster.is_running(instance) and list(self.cluster.record(instance).argv) != argv:
                self.replace(instance, argv)
        self.cluster.up()

    def add_worker(self, role: str, instance: str, **settings: Setting) -> ProcessRecord:
        """Starts one more worker by hand; does not wait for it."""
        argv = service_argv(self.spec, self.home, running_addresses(self.home), role, instance)
        argv += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return servers.launch(instance, argv, self.home)

    def rank_pids(self, instance: str) -> list[int]:
        """Process ids of an instance's ranks, in the order of their start."""
        parent = self.cluster.record(instance).pid
        return sorted(pid for pid in children_of(parent) if b"tidemill_engine.rank" in command_line(pid))

    def kill_rank(self, instance: str, index: int = 0, signum: int = signal.SIGKILL) -> int:
        """Signals one rank process of an instance; returns its process id."""
        pid = self.rank_pids(instance)[index]
        os.kill(pid, signum)
        return pid

    def launched(self) -> list[str]:
        """All instances that were started, with the cluster and by hand."""
        return [record.name for record in processes.read_all(self.home.run) if record.name not in ("etcd", "nats")]

    # -- look ---------------------------------------------------------------------------------------------------

    async def look(self) -> MeshView:
        """All members and their status."""
        return await look(running_addresses(self.home))

    async def holds(self) -> dict[str, int]:
        """All holds that are not zero, as "instance.kind"; members that do not answer count as "instance.silent"."""
        view = await self.look()
        silent = {f"{name}.silent": 1 for name, member in view.members.items() if member.problem}
        return {**view.held(), **silent}

    async def holds_are_zero(self, within_s: float = 180.0) -> None:
        """Waits until every block, reservation, ticket and stream is given back; AssertionError names what is not."""
        end = time.monotonic() + within_s
        while held := await self.holds():
            assert time.monotonic() < end, f"still held after {within_s:.0f} s: {held}"
            await asyncio.sleep(POLL_S)

    async def until_members(self, *instances: str, within_s: float = START_TIMEOUT_S) -> MeshView:
        """Waits until exactly these instances are registered and answer; a failure shows the logs of those missing."""
        end = time.monotonic() + within_s
        while True:
            view = await self.look()
            if set(view.members) == set(instances) and not any(m.problem for m in view.members.values()):
                return view
            missing = sorted(set(instances) - set(view.members))
            ended = [name for name in missing if not self.cluster.is_running(name)]
            if ended or time.monotonic() > end:
                logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in missing)
                raise AssertionError(f"members after {within_s:.0f} s: {sorted(view.members)}, ended: {ended}\n{logs}")
            await asyncio.sleep(POLL_S)

    def log(self, name: str, lines: int = 40) -> str:
        """The end of one process's log."""
        with contextlib.suppress(KeyError):
            return processes.log_tail(self.cluster.record(name), lines)
        return ""

    def logs(self, lines: int = 40) -> str:
        """The ends of all logs, for the report of a failed test."""
        tails = []
        for path in sorted(self.home.logs.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            tails.append(f"--- {path.name}\n" + "\n".join(text))
        return "\n".join(tails)


def children_of(pid: int) -> list[int]:
    """Process ids whose parent is this one."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                children += map(int, (task / "children").read_text().split())
    return children


def command_line(pid: int) -> bytes:
    """The arguments of a process, separated by zero bytes; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
