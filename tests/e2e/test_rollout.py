"""A decode instance is replaced and the number of them changed by hand, while clients notice nothing."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import grpc
import pytest
from harness.running import RunningCluster

from tidemill.mesh.v1 import autoscaler_pb2, autoscaler_pb2_grpc
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local.mesh_view import MeshView

QUICK = {"tick_s": 0.2, "window_s": 1.0, "scale_in_after_s": 2.0, "cooldown_s": 1.0, "warmup_s": 1.0, "settle_s": 1.0}
PATIENCE_S = 120.0
OUTPUT_TOKENS = 50


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
        await autoscaler_pb2_grpc.AutoscalerServiceStub(channel).SetBounds(request, timeout=10.0)


def drain(cluster: RunningCluster, instance: str) -> str:
    """What an operator types."""
    argv = [sys.executable, "-m", "tidemill_local", "drain", instance]
    env = {**os.environ, "TIDEMILL_HOME": str(cluster.home.root)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
async def test_no_request_fails_while_decode_grows_is_drained_and_shrinks(start_cluster):
    cluster = start_cluster(kvstores=0, settings={"autoscaler": QUICK})
    busy = True

    async def load(index: int) -> int:
        served = 0
        async with cluster.client() as client:
            while busy:
                answer = await client.complete(
                    model=cluster.model, text=f"{index}-{served}", max_tokens=OUTPUT_TOKENS, ignore_eos=True
                )
                assert len(answer.choices[0].token_ids) == OUTPUT_TOKENS
                served += 1
        return served

    async with asyncio.TaskGroup() as group:
        loads = [group.create_task(load(i)) for i in range(3)]
        await set_decode_bounds(cluster, 2)
        await until(cluster, "two decode instances", lambda view: len(serving_decodes(view)) == 2)

        assert "decode-1 drains" in await asyncio.to_thread(drain, cluster, "decode-1")
        await until(cluster, "decode-1 has left", lambda view: "decode-1" not in view.members)
        await until(cluster, "another one in its place", lambda view: len(serving_decodes(view)) == 2)

        await set_decode_bounds(cluster, 1)
        await until(cluster, "one decode instance", lambda view: len(view.with_role(Role.ROLE_DECODE)) == 1)
        busy = False
    assert all(task.result() > 0 for task in loads)
    await cluster.holds_are_zero()
