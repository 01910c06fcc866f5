"""With the real router, and without it when it is gone."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import grpc
import pytest
from gateway_emulated import TEXT

from tidemill.client import Client
from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER
from tidemill.mesh.v1.router_pb2 import GetRouterStatusRequest
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceStub

pytest.importorskip("tidemill_router.__main__")


class Router:
    """A router process of the mesh."""

    def __init__(self, mesh, log_path):
        self._mesh = mesh
        self._log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None

    def records(self):
        return [r for r in self._mesh.context.instances.records.values() if r.role == ROLE_ROUTER]

    async def start(self, instance):
        settings = self._mesh.settings
        argv = [sys.executable, "-m", "tidemill_router", "--instance", instance, "--mesh", settings.mesh,
                "--etcd", settings.etcd, "--nats", settings.nats, "--liveness-s", "2.5"]  # fmt: skip
        with self._log_path.open("ab") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ)  # noqa: ASYNC220
        await self._mesh.until(lambda: any(r.instance == instance for r in self.records()), bound_s=540)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
async def router(emulated_mesh, tmp_path):
    router = Router(emulated_mesh, tmp_path / "router.log")
    yield router
    if router.process is not None:
        with contextlib.suppress(ProcessLookupError):
            router.kill()
    print((tmp_path / "router.log").read_text())


async def ask(mesh, max_tokens=20):
    async with Client(mesh.grpc_endpoint) as client:
        return await client.complete(model="tiny", text="hello", max_tokens=max_tokens, include_placement=True)


async def placed_by_router(mesh):
    async with asyncio.timeout(120):
        while (done := await ask(mesh)).placement.degraded:
            await asyncio.sleep(0.1)
    return done


async def test_the_router_places_and_its_reservations_end(emulated_mesh, router):
    await router.start("router-one")
    done = await placed_by_router(emulated_mesh)
    assert done.text == TEXT[:20]
    assert done.placement.prefill_terms
    assert router.records()[0].stream_endpoint not in ("", router.records()[0].endpoint)
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)
    async with grpc.aio.insecure_channel(router.records()[0].endpoint) as channel, asyncio.timeout(120):
        stub = RouterServiceStub(channel)
        while any((await stub.GetRouterStatus(GetRouterStatusRequest())).holds.values()):
            await asyncio.sleep(0.05)


async def test_a_killed_router_is_bypassed_and_a_new_one_is_asked_again(emulated_mesh, router):
    await router.start("router-one")
    await placed_by_router(emulated_mesh)
    router.kill()
    done = await ask(emulated_mesh)
    assert (done.text, done.placement.degraded) == (TEXT[:20], "router")
    await router.start("router-two")
    done = await placed_by_router(emulated_mesh)
    assert done.text == TEXT[:20]
