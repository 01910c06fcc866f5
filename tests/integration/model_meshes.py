"""What tests of a mesh with several models ask of it."""

import asyncio
import re
from collections.abc import Collection, Sequence

import grpc
import httpx2
from harness.running import RunningCluster
from integration.reference import Reference, check_greedy

from tidemill.completion import Completion
from tidemill.mesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc

OUTPUT_TOKENS = 40


async def until_ready(mesh: RunningCluster, models: Collection[str], timeout_s: float) -> None:
    """Waits until the gateway lists these models, and no others, as ready."""
    async with mesh.client() as client, asyncio.timeout(timeout_s):
        while {model.name for model in await client.models() if model.ready} != set(models):
            await asyncio.sleep(0.1)


async def ask(mesh: RunningCluster, model: str, prompt: Sequence[int], max_tokens: int = OUTPUT_TOKENS) -> Completion:
    """A greedy answer with log-probabilities."""
    async with mesh.client() as client:
        return await client.complete(
            model=model,
            token_ids=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=True,
            include_placement=True,
        )


async def reset_caches(mesh: RunningCluster, instances: Sequence[str]) -> None:
    """Empties L1 of workers."""
    for instance in instances:
        async with grpc.aio.insecure_channel(mesh.cluster.endpoint(instance)) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetCache(worker_pb2.ResetCacheRequest(), timeout=120.0)


async def router_knows_blocks_of(mesh: RunningCluster, instance: str) -> int:
    """Waits until the router has all that the instance's first domain has told; how many blocks that has in L1."""
    async with grpc.aio.insecure_channel(mesh.cluster.endpoint(instance)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        parts = [part async for part in stub.GetSnapshot(worker_pb2.GetSnapshotRequest(), timeout=120.0)]
    async with asyncio.timeout(180.0):
        while True:
            views = (await mesh.look()).members["router-1"].status.instances
            view = next(view for view in views if view.domain.instance == instance)
            if view.event_sequence >= parts[0].sequence:
                in_l1 = (run for part in parts for run in part.blocks if run.tier == common_pb2.TIER_L1)
                return sum(len(run.block_hashes) for run in in_l1) // 16
            await asyncio.sleep(0.05)


async def credited_tokens(mesh: RunningCluster) -> dict[str, int]:
    """Prompt tokens by tier that the router has expected chosen instances to have, over all placements."""
    async with httpx2.AsyncClient(base_url=f"http://{mesh.cluster.http_endpoint('router-1')}", timeout=120) as http:
        text = (await http.get("/metrics")).text
    found = re.findall(r'^tidemill_router_expected_cached_tokens_total{.*tier="(l\d)".*} (\S+)$', text, re.MULTILINE)
    return {tier: int(float(value)) for tier, value in found}


async def check_blocks_come_back_from_kvstore(
    mesh: RunningCluster,
    model: str,
    workers: Sequence[str],
    reference: Reference,
    prompt: Sequence[int],
    bound: float,
    stored_tokens: int,
) -> None:
    """Answers are the same, and right, before and after the workers' pools are emptied; the blocks come from L3."""
    before = await ask(mesh, model, prompt)
    # Offloads are holds: none left means that all is stored.
    await mesh.holds_are_zero()
    await reset_caches(mesh, workers)

    after = await ask(mesh, model, prompt)
    check_greedy(reference, prompt, after.choices[0], bound)
    assert after.choices[0].token_ids == before.choices[0].token_ids
    assert (before.usage.cached_tokens_l3, after.usage.cached_tokens_l1) == (0, 0)
    assert after.usage.cached_tokens_l3 == stored_tokens
