"""Waiting until what was started really serves."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tidemill.mesh.v1 import router_pb2, router_pb2_grpc
from tidemill.v1 import inference_pb2, inference_pb2_grpc
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


def wait_for(record: ProcessRecord, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
    """Polls until ready; StartFailed if the process ends first or the time is over."""
    end = time.monotonic() + timeout_s
    while not ready():
        if not processes.alive(record):
            raise StartFailed(record, "ended while it started")
        if time.monotonic() >= end:
            raise StartFailed(record, f"was not {what} within {timeout_s:.0f} s")
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


def router_sees(endpoint: str, workers: set[str]) -> bool:
    """True if the router could place requests on all of these workers."""
    try:
        with grpc.insecure_channel(endpoint) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            status = stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=RPC_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return workers <= {view.domain.instance for view in status.instances if not view.fenced and not view.draining}


def model_ready(endpoint: str, model: str) -> bool:
    """True if the gateway lists the model as servable."""
    try:
        with grpc.insecure_channel(endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=RPC_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return any(served.ready for served in answer.models if model in (served.name, *served.aliases))
