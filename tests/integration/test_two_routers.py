"""Two routers of one mesh see the same blocks and reservations, and either may die; real model and processes."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from harness.fixtures import kept
from harness.running import RunningCluster
from integration.reference import prompt_of

from tidemill.client import Client
from tidemill.completion import Completion
from tidemill.mesh.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.full

ROUTERS = ("router-1", "router-2")
BLOCK = 16


@pytest.fixture(scope="module")
def mesh(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    worker = {"block_size": BLOCK}
    settings = {"prefill": worker, "decode": worker}
    made = RunningCluster.start(checkpoint("llama"), routers=2, prefill=2, autoscalers=0, kvstores=1, settings=settings)
    with kept(made):
        yield made


async def ask(mesh: RunningCluster, prompt: list[int]) -> Completion:
    async with Client(mesh.grpc) as client:
        answer = await client.complete(
            model=mesh.model, token_ids=prompt, max_tokens=8, temperature=0.0, ignore_eos=True, include_placement=True
        )
    await mesh.holds_are_zero()
    return answer


async def status(mesh: RunningCluster, router: str) -> router_pb2.GetRouterStatusResponse:
    async with grpc.aio.insecure_channel(mesh.cluster.endpoint(router)) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return await stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=300)


def view_of(answer: router_pb2.GetRouterStatusResponse) -> dict[str, tuple[int, int]]:
    return {view.domain.instance: (view.index_blocks, view.event_sequence) for view in answer.instances}


async def test_two_routers_see_the_same_blocks_and_either_may_die(mesh: RunningCluster) -> None:
    await asyncio.gather(*(ask(mesh, prompt_of(f"warm {i}", 80)) for i in range(6)))
    while True:
        left, right = [await status(mesh, router) for router in ROUTERS]
        if view_of(left) == view_of(right) and left.counters["replicas_followed"] == 1:
            break
        await asyncio.sleep(0.05)
    assert right.counters["replicas_followed"] == 1
    assert left.counters["replica_batches"] + right.counters["replica_batches"] > 0, "placements were shared"
    for router in ROUTERS:
        mesh.kill(router)
        answers = await asyncio.gather(
            *(ask_now(mesh, prompt_of(f"{router} {i}", 60)) for i in range(4)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Completion] * 4, answers
        mesh.restart(router)
    await mesh.holds_are_zero()


async def ask_now(mesh: RunningCluster, prompt: list[int]) -> Completion:
    async with Client(mesh.grpc) as client:
        return await client.complete(model=mesh.model, token_ids=prompt, max_tokens=8, temperature=0.0)
