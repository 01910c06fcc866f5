"""Blocks go to kvstore and come back. The stores are emulated, wire and transfers are real."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from emulated_kvstore import EmulatedKvStore, running_store
from gateway_rig import GatewayRig
from worker_rig import Connect, Servers, StartWorker, WorkerProcess

from tidemill.mesh.v1 import worker_pb2

MESH = "l3"
BLOCK = 32
# Six full blocks and a part of one; the toy model takes snapshots at multiples of two blocks.
SETTINGS = {
    "mesh": MESH,
    "transport": "tcp",
    "l3_timeout_s": 4.0,
    "onboard_deadline_s": 6.0,
    "onboard_choice": "always",
}
# An alarm at six blocks and in half a second.
SETTINGS |= {"one_way_tier_blocks": 6, "one_way_tier_s": 0.5}
PROMPT = [(13 * i) % 250 for i in range(6 * BLOCK + 5)]


@pytest.fixture(scope="module", params=["llama", pytest.param("toy", marks=pytest.mark.full)])
def worker(start_worker: StartWorker, request: pytest.FixtureRequest) -> WorkerProcess:
    """A prefill worker with L3, of a model without and of one with sequence state."""
    return start_worker("prefill", f"l3-{request.param}", request.param, **SETTINGS)


@pytest.fixture
async def stores(servers: Servers) -> AsyncIterator[list[EmulatedKvStore]]:
    """Two stores."""
    async with running_store(servers, "kvstore-1", MESH) as one, running_store(servers, "kvstore-2", MESH) as two:
        yield [one, two]


async def ask(rig: GatewayRig, request_id: str, prompt: list[int]) -> tuple[list[int], int]:
    """Runs a request; its tokens and the prompt tokens that came from L3."""
    rig.submit(request_id, prompt, max_tokens=4)
    await rig.finished(request_id)
    first = next(output for output in rig.outputs[request_id] if output.HasField("cached"))
    return rig.tokens(request_id), first.cached.l3


async def counters(rig: GatewayRig) -> dict[str, int]:
    """The worker's counters."""
    return dict((await rig.status()).counters)


async def stored(rig: GatewayRig, blocks: int) -> None:
    """Waits until so many blocks are in L3, as the worker has counted them."""
    async with asyncio.timeout(120):
        while True:
            counts = await counters(rig)
            if counts.get("l3_blocks_offloaded", 0) + counts.get("l3_blocks_present", 0) >= blocks:
                return
            await asyncio.sleep(0.05)


async def known(rig: GatewayRig, stores: list[EmulatedKvStore]) -> None:
    """Waits until the worker knows all stores: until each has got a share of prompts that no test asks for."""
    number = 0
    while not all(store.blocks for store in stores):
        number += 1
        await ask(rig, f"known-{number}", [number, *PROMPT])
        await rig.until_idle()
    for store in stores:
        store.blocks.clear()


async def forget(rig: GatewayRig) -> None:
    """Empties L1."""
    await rig.stub.ResetCache(worker_pb2.ResetCacheRequest())


async def test_computed_blocks_come_back_from_l3_with_the_same_tokens(
    worker: WorkerProcess, stores: list[EmulatedKvStore], connect: Connect
) -> None:
    async with connect(worker) as rig:
        await known(rig, stores)
        before = await counters(rig)
        cold, from_l3 = await ask(rig, "cold", PROMPT)
        assert from_l3 == 0
        await stored(rig, before.get("l3_blocks_offloaded", 0) + before.get("l3_blocks_present", 0) + 6)
        assert all(store.blocks for store in stores), "both stores have a share"
        await forget(rig)
        assert await ask(rig, "warm", PROMPT) == (cold, 6 * BLOCK)
        await rig.until_idle()
    for store in stores:
        assert store.asked_for["get"] == {"warm"}
        assert all(number.startswith("offload-") for number in store.asked_for["put"])
        assert "warm" in store.asked_for["has"]


async def test_stores_that_only_take_blocks_raise_an_alarm_until_one_gives(
    worker: WorkerProcess, stores: list[EmulatedKvStore], connect: Connect
) -> None:
    for store in stores:
        store.hides = True
    async with connect(worker) as rig, asyncio.timeout(300):
        number, prompt = 0, PROMPT
        while not (await counters(rig)).get("one_way_l3"):
            number += 1
            prompt = [number % 250, *PROMPT[1:]]
            assert (await ask(rig, f"unfound-{number}", prompt))[1] == 0
        assert "a tier takes blocks and gives none" in worker.log_tail()
        for store in stores:
            store.hides = False
        while (await counters(rig))["one_way_l3"]:
            number += 1
            await forget(rig)
            await ask(rig, f"found-{number}", prompt)
        await rig.until_idle()


async def test_a_flipped_bit_costs_the_hit_and_changes_no_token(
    worker: WorkerProcess, stores: list[EmulatedKvStore], connect: Connect
) -> None:
    prompt = PROMPT[1:]
    async with connect(worker) as rig:
        await known(rig, stores)
        before = await counters(rig)
        cold, _ = await ask(rig, "clean", prompt)
        await stored(rig, before.get("l3_blocks_offloaded", 0) + before.get("l3_blocks_present", 0) + 6)
        for store in stores:
            store.corrupt = True
        await forget(rig)
        tokens, from_l3 = await ask(rig, "flipped", prompt)
        assert tokens == cold
        assert from_l3 < 6 * BLOCK
        assert sum(store.gets for store in stores) > 0
        await rig.until_idle()


async def test_a_store_that_does_not_answer_costs_its_deadline_only(
    worker: WorkerProcess, stores: list[EmulatedKvStore], connect: Connect
) -> None:
    async with connect(worker) as rig:
        await known(rig, stores)
        for store in stores:
            store.silent = True
        tokens, from_l3 = await ask(rig, "unanswered", PROMPT[2:])
        assert (len(tokens), from_l3) == (4, 0)
        assert (await counters(rig))["l3_errors_deadline"] >= 1
        for store in stores:
            store.silent = False
        await rig.until_idle()


async def test_without_any_store_requests_are_computed(worker: WorkerProcess, connect: Connect) -> None:
    async with connect(worker) as rig:
        tokens, from_l3 = await ask(rig, "alone", PROMPT[3:])
        assert (len(tokens), from_l3) == (4, 0)
        await rig.until_idle()
