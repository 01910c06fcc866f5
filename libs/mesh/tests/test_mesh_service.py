"""A whole service process: start without its servers, status pages, drain, and the ways it ends."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill_mesh import service as service_module
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.drain import Drain
from tidemill_mesh.service import ServiceContext, run_service, write_atomically

Child = Callable[..., Awaitable[asyncio.subprocess.Process]]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]

SERVICE = """
import asyncio, sys, time
from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh import service as service_module
from tidemill_mesh.config import ServiceSettings, load_settings
from tidemill_mesh.server import serve_grpc
from tidemill_mesh.service import run_service

mode, argv = sys.argv[1], sys.argv[2:]

async def main(context):
    async with serve_grpc(context.settings, []) as server:
        server.set_serving(True)
        record = membership_pb2.MembershipRecord(
            instance=context.instance, role=membership_pb2.ROLE_GATEWAY, endpoint=server.endpoint)
        registration = await context.membership.register(record)
        await context.publish_run_file(server.endpoint)
        if mode == "block":
            time.sleep(3600)
        await context.drain.requested.wait()
        if mode == "stuck":
            await asyncio.sleep(3600)
        await registration.deregister()
        await server.stop(context.drain.deadline_s)

settings = load_settings(ServiceSettings, "gateway", argv)
sys.exit(run_service("gateway", settings, main))
"""


class Started:
    """A service process and where it says it is."""

    def __init__(self, process: asyncio.subprocess.Process, run_file: Path) -> None:
        self.process = process
        self.run_file = run_file

    def run(self) -> dict[str, Any]:
        return dict(json.loads(self.run_file.read_text()))

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(fetch, f"http://{self.run()['http_endpoint']}{path}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def service(
    child: Child, tmp_path: Path, eventually: Eventually, etcd: Any, nats_server: Any
) -> Callable[..., Awaitable[Started]]:
    async def start(
        mode: str, etcd_at: str = etcd.address, nats_at: str = nats_server.address, liveness_s: float = 30.0
    ) -> Started:
        flags = ["--instance=gw-1", f"--run-dir={tmp_path}", f"--liveness-s={liveness_s}"]
        flags += [f"--etcd={etcd_at}", f"--nats=nats://{nats_at}"]
        started = Started(await child(SERVICE, mode, *flags), tmp_path / "gw-1.json")
        await eventually(lambda: started.run_file.exists() or started.process.returncode is not None)
        return started

    return start


async def test_it_serves_its_status_registers_and_drains(service: Callable[..., Awaitable[Started]]) -> None:
    started = await service("serve")
    run = started.run()
    assert (run["service"], run["instance"], run["pid"]) == ("gateway", "gw-1", started.process.pid)
    assert await started.get("/health") == (200, "ok\n")
    assert await started.get("/ready") == (200, "ready\n")
    assert (await started.get("/nowhere"))[0] == 404
    status, metrics = await started.get("/metrics")
    assert status == 200
    assert 'tidemill_gateway_info{instance="gw-1"' in metrics
    for server in ("bus", "etcd"):
        # Its start waits a second for each, and then goes on without it.
        while f"tidemill_gateway_{server}_connected 1.0" not in metrics:
            metrics = (await started.get("/metrics"))[1]
    started.stop()
    assert await started.process.wait() == 0
    assert not started.run_file.exists()


async def test_it_starts_and_stops_without_etcd_and_nats(
    service: Callable[..., Awaitable[Started]], dead_address: str
) -> None:
    started = await service("serve", dead_address, dead_address, liveness_s=0.6)
    assert (await started.get("/ready"))[0] == 200
    started.stop()
    assert await started.process.wait() == 0


async def test_a_drain_is_not_ready_and_a_second_signal_ends_it_at_once(
    service: Callable[..., Awaitable[Started]],
) -> None:
    started = await service("stuck")
    started.stop()
    while (await started.get("/ready"))[0] != 503:
        continue
    assert await started.get("/health") == (200, "ok\n")
    started.stop()
    assert await started.process.wait() == 128 + signal.SIGTERM


async def test_a_stuck_event_loop_is_not_healthy(service: Callable[..., Awaitable[Started]]) -> None:
    started = await service("block", liveness_s=0.6)
    assert (await started.get("/health"))[0] == 503


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("how", "status"), [("return", 0), ("fail", 1), ("drain", 0), ("stuck", 1)])
def test_the_exit_status_says_how_main_ended(
    how: str, status: int, etcd: Any, nats_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(context: ServiceContext) -> None:
        if how == "fail":
            raise RuntimeError("broken main")
        if how in ("drain", "stuck"):
            os.kill(os.getpid(), signal.SIGTERM)
            await context.drain.requested.wait()
        if how == "stuck":
            await asyncio.sleep(3600)

    monkeypatch.setattr(service_module, "CLOSE_GRACE_S", 0.1)
    settings = ServiceSettings(etcd=etcd.address, nats=f"nats://{nats_server.address}", drain_s=0.0, mesh=f"exit-{how}")
    assert run_service("gateway", settings, main) == status


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("wrong", ["host", "http_port", "instance"])
def test_a_start_that_cannot_be_is_refused_by_name(wrong: str, etcd: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def never(_context: ServiceContext) -> None:
        raise AssertionError("main must not run")

    changes = {
        "host": {"host": "0.0.0.0"},
        "http_port": {"http_port": etcd.port},
        "instance": {"instance": "Gateway_1"},
    }
    settings = ServiceSettings(etcd=etcd.address, nats=f"nats://127.0.0.1:{etcd.port}", **changes[wrong])
    assert run_service("gateway", settings, never) == 1
    told = {"host": "0.0.0.0", "http_port": str(etcd.port), "instance": "Gateway_1"}
    assert told[wrong] in capsys.readouterr().err


def test_a_drain_counts_down_from_the_request() -> None:
    now = 100.0
    drain = Drain(30.0, lambda: now)
    assert drain.deadline_s == 30.0
    drain.request()
    now = 110.0
    drain.request()
    assert drain.deadline_s == 20.0
    assert drain.requested.is_set()
    now = 200.0
    assert drain.deadline_s == 0.0


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file.json"]
