"""Workers that refuse, stall, freeze and die at random moments, under many requests: every one ends, once, whole."""

import asyncio
import random
from dataclasses import replace

import httpx2
import pytest
from gateway_emulated import TEXT, canned

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError

REFUSALS = (errors_pb2.ERROR_CODE_WORKER_LOST, errors_pb2.ERROR_CODE_STALE, errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED)
TOKENS = 48


async def strike(mesh, chance: random.Random) -> None:
    """One fault; a dead worker has a successor at once."""
    worker = chance.choice(list(mesh.fleet.values()))
    match chance.randrange(6):
        case 0:
            mesh.fleet.pop(worker.instance)
            await mesh.add(worker.role, step_s=0.001)
            worker.die()
        case 1:
            worker.frozen = True
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            worker.frozen = False
        case 2:
            worker.step_s = chance.choice([0.0, 0.001, 0.02])
        case _:
            worker.refuse = MeshError(chance.choice(REFUSALS), "the storm")


@pytest.mark.parametrize("seed", [3, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
async def test_every_request_ends_whole_whatever_its_workers_do(bare_mesh, seed):
    chance = random.Random(seed)
    bare_mesh.settings = replace(bare_mesh.settings, max_attempts=32, liveness_s=1.0)
    bare_mesh.answer = canned(TEXT, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        for _ in range(2):
            await bare_mesh.add(role, step_s=0.001)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    storm_is_on = True

    async def storm() -> None:
        while storm_is_on:
            await strike(bare_mesh, chance)
            await asyncio.sleep(chance.uniform(0.0, 0.03))

    async def ask(http: httpx2.AsyncClient, i: int) -> str:
        await asyncio.sleep(chance.uniform(0.0, 0.6))
        body = {"model": "tiny", "prompt": f"{i}", "max_tokens": TOKENS, "n": 1 + i % 2}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        texts = {choice["text"] for choice in answer.json()["choices"]}
        assert len(texts) == 1
        return texts.pop()

    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        storming = asyncio.create_task(storm())
        asked = [asyncio.create_task(ask(http, i)) for i in range(30)]
        await asyncio.sleep(1.2)
        storm_is_on = False
        await storming
        for worker in bare_mesh.fleet.values():
            worker.refuse, worker.frozen = None, False
        assert set(await asyncio.gather(*asked)) == {TEXT[:TOKENS]}
        await bare_mesh.until(lambda: bare_mesh.holds() == 0)
        assert set((await http.get("/debug/holds")).json().values()) == {0}
