"""Real services keep no memory of requests that are over: what their processes take levels off over rounds."""

import asyncio

import httpx2
import pytest
from harness.memory import LATE_ROUNDS, late_growth

REQUESTS = 60
"""In each round."""
PROMPT_WORDS = 100
IGNORED_CHARS = 400_000
"""Of each body, in a field that nobody knows."""
GATEWAY_KEPT_SHARE = 0.1
KEPT_BYTES = 32 << 10
"""Of a request on average, at most, elsewhere; what allocators keep comes to a quarter of it."""


@pytest.mark.full
async def test_processes_level_off_while_they_serve_rounds_of_requests(start_cluster):
    # What is stored in L2 and L3 is to grow; the pool is full after two rounds.
    no_tiers = {"l2_memory_bytes": 0}
    cluster = start_cluster(kvstores=0, settings={"prefill": no_tiers, "decode": no_tiers})

    async with httpx2.AsyncClient(base_url=f"http://{cluster.http}", timeout=300) as http:

        async def ask(number: int) -> None:
            prompt = f"{number} " + "So long. " * PROMPT_WORDS
            body = {"model": cluster.model, "prompt": prompt, "max_tokens": 2, "ignored": "x" * IGNORED_CHARS}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

        async def run_round(number: int) -> None:
            lanes = asyncio.Semaphore(4)

            async def one(index: int) -> None:
                async with lanes:
                    await ask(number * REQUESTS + index)

            await asyncio.gather(*map(one, range(REQUESTS)))
            await cluster.holds_are_zero()

        names = ("gateway-1", "router-1", "prefill-1", "decode-1")
        pids = {name: cluster.cluster.record(name).pid for name in names}
        pids |= {f"rank of {name}": cluster.rank_pids(name)[0] for name in ("prefill-1", "decode-1")}
        grown = await late_growth(run_round, pids)
    kept = {name: size / (LATE_ROUNDS * REQUESTS) for name, size in grown.items()}
    assert kept.pop("gateway-1") < GATEWAY_KEPT_SHARE * IGNORED_CHARS, kept
    assert max(kept.values()) < KEPT_BYTES, kept
