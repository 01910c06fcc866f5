"""What a prefix costs by the tier it comes from: time to the first token of a long prompt, computed and cached.

SmolLM2 on CPU cores, one prefill instance, a pool that holds one prompt and little more, so that a second prompt pushes
the first one out of L1. One token is asked for: nothing is handed over, and only prefill holds the prompts.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import grpc

from tidemill.client import Client
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_bench.local_cluster import Served, real_model_cluster
from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_bench.workload import shared_prefix_prompts
from tidemill_local.cluster import running_addresses
from tidemill_local.mesh_view import look
from tidemill_local.spec import Setting
from tidemill_mesh import log

PROMPT_TOKENS, VOCAB_SIZE = 2048, 49152
POOL_BLOCKS = 80
"""Of 32 tokens: one prompt and its neighbour's beginning."""
SETTINGS: dict[str, dict[str, Setting]] = {
    "prefill": {"num_blocks": POOL_BLOCKS, "l2_memory_bytes": 512 << 20, "max_num_batched_tokens": 512},
    "decode": {"num_blocks": POOL_BLOCKS},
    # A prompt that takes seconds must not go to the decode instance, whose tiers are others.
    "router": {"local_prefill_load": 0.0, "direct_uncached_tokens": 0},
}
QUIET_S = 30.0


@dataclass(frozen=True)
class Asked:
    """One prompt's time to its only token, and where its tokens came from."""

    seconds: float
    from_l1: int
    from_l2: int
    from_l3: int


async def _ask(served: Served, client: Client, prompt: Sequence[int]) -> Asked:
    started = time.perf_counter()
    answer = await client.complete(model=served.model, token_ids=list(prompt), max_tokens=1, temperature=0.0)
    seconds = time.perf_counter() - started
    await _settle(served)
    usage = answer.usage
    return Asked(seconds, usage.cached_tokens_l1, usage.cached_tokens_l2, usage.cached_tokens_l3)


async def _settle(served: Served) -> None:
    """Waits until everything that a request left has been written down."""
    async with asyncio.timeout(QUIET_S):
        # Other processes do it, and announce nothing.
        while (await look(running_addresses(served.cluster.home))).held():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _forget(served: Served) -> None:
    """Empties L1 and L2."""
    view = await look(running_addresses(served.cluster.home))
    for member in view.with_role(ROLE_PREFILL, ROLE_DECODE):
        async with grpc.aio.insecure_channel(member.record.endpoint) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetCache(worker_pb2.ResetCacheRequest())


async def _round(served: Served, prompts: Sequence[Sequence[int]]) -> dict[str, Asked]:
    """One prompt from each tier; another prompt takes its place in L1 before it comes from L2."""
    measured, other = prompts
    async with Client(served.grpc_endpoint) as client:
        found = {"computed": await _ask(served, client, measured), "L1": await _ask(served, client, measured)}
        await _ask(served, client, other)
        found["L2"] = await _ask(served, client, measured)
        await _forget(served)
        found["L3"] = await _ask(served, client, measured)
    return found


def _prompts(seed: int) -> list[list[int]]:
    return shared_prefix_prompts(2, prompt_tokens=PROMPT_TOKENS, shared_tokens=0, vocab_size=VOCAB_SIZE, seed=seed)


def run(options: Options) -> list[Row]:
    """Rounds of fresh prompts."""
    log.configure("console", "warning", "bench", "tiers")
    rounds = 1 if options.quick else 3
    found: dict[str, list[Asked]] = defaultdict(list)
    with real_model_cluster(options, SETTINGS) as served:
        asyncio.run(_round(served, _prompts(999)))
        for number in range(rounds):
            for tier, asked in asyncio.run(_round(served, _prompts(number))).items():
                found[tier].append(asked)
    return _rows(found)


def _rows(found: dict[str, list[Asked]]) -> list[Row]:
    here = machine()
    workload = f"SmolLM2-135M, {PROMPT_TOKENS}-token prompt, one client, UCX, kvstore on local disk"
    computed_ms = median(asked.seconds for asked in found["computed"]) * 1000
    rows = []
    for tier, runs in found.items():
        shares = {
            "L1": median(asked.from_l1 for asked in runs),
            "L2": median(asked.from_l2 for asked in runs),
            "L3": median(asked.from_l3 for asked in runs),
        }
        cached = ", ".join(f"{tokens:.0f} tokens from {name}" for name, tokens in shares.items() if tokens)
        rows.append(
            Row(
                metric=f"time to first token, {tier}",
                unit="ms",
                value=median(asked.seconds for asked in runs) * 1000,
                higher_is_better=False,
                workload=f"{workload}; {cached or 'nothing cached'}",
                machine=here,
                baseline=None if tier == "computed" else "computed",
                baseline_value=None if tier == "computed" else computed_ms,
                goal=None if tier == "computed" else "<= 0.5x of computing",
            )
        )
    return rows
