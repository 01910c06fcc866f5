"""Decode instances come and go, router and gateway are replaced, while clients notice nothing."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import grpc
from harness.running import RunningCluster
from harness.steady import SteadyLoad

from tidemill.mesh.v1 import autoscaler_pb2, autoscaler_pb2_grpc
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local.mesh_view import MeshView

QUICK = {"tick_s": 0.2, "window_s": 1.0, "scale_in_after_s": 2.0, "cooldown_s": 1.0, "warmup_s": 1.0, "settle_s": 1.0}
# A slow machine takes minutes to start a worker.
QUICK |= {"start_timeout_s": 600.0}
PATIENCE_S = 400.0
PROMPT_TOKENS = 80
OUTPUT_TOKENS = 50
CASES = 12


async def until(cluster: RunningCluster, what: str, reached: Callable[[MeshView], bool]) -> None:
    """Looks until the mesh is in a state."""
    end = time.monotonic() + PATIENCE_S
    while not reached(view := await cluster.look()):
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s; members {sorted(view.members)}"
        await asyncio.sleep(0.5)


def serving_decodes(view: MeshView) -> list[str]:
    """Decode instances that take requests."""
    return [
        member.record.instance
        for member in view.with_role(Role.ROLE_DECODE)
        if not member.record.draining and not member.problem
    ]


async def set_decode_bounds(cluster: RunningCluster, replicas: int) -> None:
    """Pins the number of decode instances."""
    async with grpc.aio.insecure_channel(cluster.cluster.endpoint("autoscaler-1")) as channel:
        request = autoscaler_pb2.SetBoundsRequest(role="decode", min_replicas=replicas, max_replicas=replicas)
        await autoscaler_pb2_grpc.AutoscalerServiceStub(channel).SetBounds(request, timeout=120.0)


def drain(cluster: RunningCluster, instance: str) -> str:
    """What an operator types."""
    argv = [sys.executable, "-m", "tidemill_local", "drain", instance]
    env = {**os.environ, "TIDEMILL_HOME": str(cluster.home.root)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_no_request_fails_while_decode_grows_is_drained_and_shrinks_and_the_front_is_replaced(
    start_cluster, oracle
):
    cluster = start_cluster(kvstores=0, gateways=2, settings={"autoscaler": QUICK})
    cases = oracle.cases("resize", CASES, PROMPT_TOKENS, OUTPUT_TOKENS)
    load = SteadyLoad(cluster, *cases, lanes=3, gateways=["gateway-1", "gateway-2"])
    async with load:
        await set_decode_bounds(cluster, 2)
        await until(cluster, "two decode instances", lambda view: len(serving_decodes(view)) == 2)

        assert "decode-1 drains" in await asyncio.to_thread(drain, cluster, "decode-1")
        await until(cluster, "decode-1 has left", lambda view: "decode-1" not in view.members)
        await until(cluster, "another one in its place", lambda view: len(serving_decodes(view)) == 2)
        for instance in ("router-1", "gateway-1"):
            await asyncio.to_thread(cluster.replace, instance)

        await set_decode_bounds(cluster, 1)
        await until(cluster, "one decode instance", lambda view: len(view.with_role(Role.ROLE_DECODE)) == 1)
        await load.until_served(3)
    await cluster.holds_are_zero()
