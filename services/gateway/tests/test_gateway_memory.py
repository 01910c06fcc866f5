"""A gateway's memory levels off: whatever became of a request, nothing of it stays."""

import asyncio

import httpx2
import pytest
from gateway_emulated import TEXT, canned, tiny_assets
from harness.memory import LATE_ROUNDS, late_traced_growth

from tidemill.client import Client
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL

REQUESTS = 40
"""In each round, of which a few are refused or left by their clients."""
PROMPT_CHARS = 12_000
KEPT_BYTES = 5000
"""Of a request on average, at most: less than half of its prompt's text, a tenth of its tokens. Emulated workers have a
prompt or two in their frames, whatever the number of requests."""


@pytest.mark.full
async def test_rounds_of_long_requests_leave_nothing_behind(bare_mesh):
    bare_mesh.assets = tiny_assets(context_tokens=PROMPT_CHARS + 1000)
    bare_mesh.answer = canned(TEXT, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role, num_blocks=1 << 16)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    async with (
        httpx2.AsyncClient(base_url=bare_mesh.http, timeout=300) as http,
        Client(bare_mesh.grpc_endpoint) as client,
    ):

        async def ask(number: int) -> None:
            prompt = f"{number} ".ljust(PROMPT_CHARS, "abcdefgh"[number % 8])
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "unknown": prompt}
            match number % 5:
                case 0:
                    assert (await http.post("/v1/completions", json=body)).status_code == 200
                case 1:
                    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                        assert "[DONE]" in (await answer.aread()).decode()
                case 2:
                    # A client that leaves in mid-stream.
                    async with http.stream(
                        "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 600}
                    ) as answer:
                        await anext(answer.aiter_lines())
                case 3:
                    assert (await http.post("/v1/completions", json={**body, "n": -1})).status_code == 400
                case _:
                    answer = await client.complete(model="tiny", text=prompt, max_tokens=6, request_id=f"r-{number}")
                    assert answer.usage.completion_tokens == 6

        async def run_round(number: int) -> None:
            lanes = asyncio.Semaphore(8)

            async def one(index: int) -> None:
                async with lanes:
                    await ask(number * REQUESTS + index)

            await asyncio.gather(*map(one, range(REQUESTS)))
            await bare_mesh.until(lambda: bare_mesh.holds() == 0, 300)
            while any((await http.get("/debug/holds")).json().values()):
                await asyncio.sleep(0.01)
            for worker in bare_mesh.fleet.values():
                # The emulation's own notes.
                worker.submits.clear()
                worker.aborts.clear()

        grown = await late_traced_growth(run_round)
    assert grown / (LATE_ROUNDS * REQUESTS) < KEPT_BYTES
