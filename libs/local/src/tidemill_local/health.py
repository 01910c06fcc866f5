"""Waiting until what was started really serves."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from tidemill.mesh.v1 import router_pb2, router_pb2_grpc
from tidemill_local import processes
from tidemill_local.home import Home
from tidemill_local.processes import ProcessRecord

POLL_S = 0.05
RPC_TIMEOUT_S = 5.0


class StartFailed(Exception):
    """A process ended, or did not become healthy in time; the message holds its last log lines."""

    def __init__(self, record: ProcessRecord, reason: str) -> None:
        super().__init__(f"{record.name} {reason}; the end of {record.log}:\n{processes.log_tail(record)}")
        self.name = record.name


@dataclass(frozen=True)
class Endpoints:
    """What a service says of itself once its servers listen."""

    pid: int
    endpoint: str
    http_endpoint: str


def endpoints(home: Home, instance: str) -> Endpoints | None:
    """The run file of an instance, None while there is none."""
    try:
        said = json.loads((home.run / f"{instance}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return Endpoints(int(said["pid"]), str(said["endpoint"]), str(said["http_endpoint"]))


def wait_for(
    record: ProcessRecord,
    what: str,
    ready: Callable[[], bool],
    timeout_s: float,
    beside: Sequence[ProcessRecord] = (),
    lacking: Callable[[], str] = str,
) -> None:
    """Polls until ready; StartFailed if the process, or one that starts beside it, ends first or the time is over.

    What is still lacking then is told with the error.
    """
    end = time.monotonic() + timeout_s
    while not ready():
        for process in (record, *beside):
            if not processes.alive(process):
                raise StartFailed(process, "ended while it started")
        if time.monotonic() >= end:
            still = f" ({lacked})" if (lacked := lacking()) else ""
            raise StartFailed(record, f"was not {what} within {timeout_s:.0f} s{still}")
        time.sleep(POLL_S)


def http_ok(endpoint: str, path: str) -> bool:
    """True if GET answers 200."""
    connection = http.client.HTTPConnection(endpoint, timeout=RPC_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def nats_ok(host: str, port: int) -> bool:
    """True if a NATS server greets there."""
    try:
        with socket.create_connection((host, port), timeout=RPC_TIMEOUT_S) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def service_ok(home: Home, record: ProcessRecord) -> bool:
    """True if this very process has published its endpoints and answers /health."""
    said = endpoints(home, record.name)
    return said is not None and said.pid == record.pid and http_ok(said.http_endpoint, "/health")


def wait_for_router(record: ProcessRecord, endpoint: str, workers: set[str], timeout_s: float) -> None:
    """Polls until a router could place requests on all of these workers; StartFailed names those it lacks."""
    lacked = ""

    def lacks_none() -> bool:
        nonlocal lacked
        lacked = router_lacks(endpoint, workers)
        return not lacked

    wait_for(record, "aware of all workers", lacks_none, timeout_s, lacking=lambda: lacked)


def router_lacks(endpoint: str, workers: set[str]) -> str:
    """The workers on which the router would place no request, each with the reason; empty if there are none."""
    try:
        with grpc.insecure_channel(endpoint) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            status = stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=RPC_TIMEOUT_S)
    except grpc.RpcError as error:
        return f"the router does not answer: {error.code().name}"  # type: ignore[attr-defined]
    known = {view.domain.instance: view for view in status.instances}
    reasons = {name: _why_unused(known.get(name)) for name in sorted(workers)}
    return ", ".join(f"{name} is {reason}" for name, reason in reasons.items() if reason)


def _why_unused(view: router_pb2.InstanceView | None) -> str:
    if view is None:
        return "no member or has no rank that is up"
    said = f"at {view.endpoint}, incarnation {view.domain.incarnation}, last report {view.load_age_s:.1f} s ago"
    return f"fenced ({said})" if view.fenced else f"draining ({said})" if view.draining else ""


def gateway_ready(http_endpoint: str) -> bool:
    """True if the gateway could serve a model; it asks no key for that."""
    return http_ok(http_endpoint, "/ready")
