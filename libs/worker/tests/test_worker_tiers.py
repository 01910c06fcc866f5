"""Blocks that left L1 come back from the instance's memory, or from another instance's; real ranks and transfers."""

import asyncio
from collections.abc import Callable

import pytest
from emulated_kvstore import running_store
from emulated_peer import flipping_peer
from gateway_rig import GatewayRig, key
from worker_rig import Connect, Servers, StartWorker, WorkerProcess

from tidemill.mesh.v1 import common_pb2, worker_pb2

BLOCK = 32
# Six full blocks and a part of one; the toy model takes snapshots at multiples of two blocks.
LENGTH = 6 * BLOCK + 5
SETTINGS = {
    "mesh": "tiers",
    "transport": "tcp",
    "num_blocks": 20,
    "l2_memory_bytes": 16 << 20,
    "l2_policy": "write_through",
    "l3_policy": "off",
    "onboard_choice": "always",
    # A machine that is busy elsewhere takes its time; a request that gives up waiting would compute its blocks.
    "onboard_deadline_s": 60.0,
    "l3_timeout_s": 60.0,
}
# Of the tiny model: two layers with two heads, K and V together 32 float32 values each.
KV_BYTES_PER_TOKEN = 2 * 2 * 32 * 4
L2_OF_FOUR_BLOCKS = 4 * BLOCK * KV_BYTES_PER_TOKEN
# With one paged group; with a window and a state; with latents and an indexer; with compressed streams.
ARCHITECTURES = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("toy", "glm_moe_dsa", "deepseek_v4")),
]
PEER_FETCHES = [
    *((name, tier, "tcp") for name in ("llama", "toy", "deepseek_v4") for tier in ("l1", "l2")),
    ("llama", "l1", "ucx"),
]
StartTiers = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def start_tiers(start_worker: StartWorker) -> StartTiers:
    """Starts a worker with little L1 and enough L2."""

    def start(instance: str, architecture: str, **settings: object) -> WorkerProcess:
        return start_worker("prefill", instance.replace("_", "-"), architecture, **(SETTINGS | settings))

    return start


def prompt(number: int) -> list[int]:
    """Prompts that share no block."""
    return [(13 * i + 7 * number + 1) % 250 for i in range(LENGTH)]


async def ask(rig: GatewayRig, request_id: str, tokens: list[int], **more: object) -> tuple[list[int], tuple[int, int]]:
    """Runs a request; its tokens, and the prompt tokens that came from L1 and L2."""
    rig.submit(request_id, tokens, max_tokens=4, **more)
    await rig.finished(request_id)
    cached = next(output for output in rig.outputs[request_id] if output.HasField("cached")).cached
    return rig.tokens(request_id), (cached.l1, cached.l2)


async def until(rig: GatewayRig, name: str, count: int) -> None:
    """Waits until the worker has counted so many."""
    async with asyncio.timeout(120):
        while (await rig.status()).counters.get(name, 0) < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_prompt_pushed_out_of_l1_comes_back_from_l2(
    architecture: str, start_tiers: StartTiers, connect: Connect
) -> None:
    worker = start_tiers(f"l2-{architecture}", architecture)
    async with connect(worker) as rig:
        cold, cached = await ask(rig, "cold", prompt(0))
        assert cached == (0, 0)
        assert await ask(rig, "again", prompt(0)) == (cold, (6 * BLOCK, 0))
        await until(rig, "l2_blocks_saved", 6)
        for number in range(1, 4):
            await ask(rig, f"other-{number}", prompt(number))
        warm, (from_l1, from_l2) = await ask(rig, "warm", prompt(0))
        assert (warm, from_l1 + from_l2) == (cold, 6 * BLOCK)
        # Chains leave from their ends, so the first block may still be there.
        assert from_l2 >= 4 * BLOCK
        await rig.until_idle()
        # A reset forgets L2 as well.
        await rig.stub.ResetCache(worker_pb2.ResetCacheRequest())
        assert await ask(rig, "reset", prompt(0)) == (cold, (0, 0))
        await rig.until_idle()


@pytest.mark.full
@pytest.mark.parametrize("policy", ["after_hits", "on_eviction"])
async def test_policies_copy_what_they_promise(policy: str, start_tiers: StartTiers, connect: Connect) -> None:
    worker = start_tiers(f"l2-{policy}", "llama", l2_policy=policy, cooling_blocks=16)
    async with connect(worker) as rig:
        cold, _ = await ask(rig, "cold", prompt(0))
        saved = (await rig.status()).counters.get("l2_blocks_saved", 0)
        # While an onboarding that is late keeps its blocks, a few are near eviction already.
        assert saved == 0 or (policy == "on_eviction" and saved < 6)
        for number in range(2):
            assert await ask(rig, f"hit-{number}", prompt(0)) == (cold, (6 * BLOCK, 0))
        # The first other prompt brings the pool near its end without evicting anything.
        await ask(rig, "other-1", prompt(1))
        await until(rig, "l2_blocks_saved", 6)
        for number in range(2, 4):
            await ask(rig, f"other-{number}", prompt(number))
        warm, (from_l1, from_l2) = await ask(rig, "warm", prompt(0))
        assert (warm, from_l1 + from_l2) == (cold, 6 * BLOCK)
        assert from_l2 >= 4 * BLOCK
        await rig.until_idle()


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "tier", "transport"), PEER_FETCHES)
async def test_blocks_come_from_the_memory_of_another_instance(
    architecture: str, tier: str, transport: str, start_tiers: StartTiers, connect: Connect
) -> None:
    name = f"{architecture}-{tier}-{transport}"
    holder = start_tiers(f"holder-{name}", architecture, transport=transport)
    taker = start_tiers(f"taker-{name}", architecture, transport=transport, l2_memory_bytes=0)
    async with connect(holder) as source, connect(taker) as rig:
        cold, _ = await ask(source, "cold", prompt(0))
        await until(source, "l2_blocks_saved", 6)
        if tier == "l2":
            for number in range(1, 4):
                await ask(source, f"other-{number}", prompt(number))
        # It says that it holds more than it does, as an old view would.
        held = common_pb2.BlockSource(holder=source.target(), num_blocks=7)
        assert await ask(rig, "fetched", prompt(0), block_sources=[held]) == (cold, (0, 6 * BLOCK))
        assert (await rig.status()).counters["peer_blocks_onboarded"] == 6
        await source.until_idle()
        await rig.until_idle()
        # A holder that is gone costs the hit only.
        gone = common_pb2.BlockSource(holder=source.target(), num_blocks=7)
        gone.holder.endpoint = "127.0.0.1:1"
        tokens, cached = await ask(rig, "alone", prompt(5), block_sources=[gone])
        assert (len(tokens), cached) == (4, (0, 0))
        if (architecture, transport) == ("llama", "tcp"):
            await a_flipped_byte_is_not_taken(source, rig)
        await rig.until_idle()


async def a_flipped_byte_is_not_taken(source: GatewayRig, rig: GatewayRig) -> None:
    """Bytes of a peer that changed on the way cost the hit and change no token."""
    right, _ = await ask(source, "right", prompt(6))
    block_bytes = BLOCK * KV_BYTES_PER_TOKEN
    async with flipping_peer(block_bytes) as (peer, target):
        held = common_pb2.BlockSource(holder=target, num_blocks=6)
        assert await ask(rig, "flipped", prompt(6), block_sources=[held]) == (right, (0, 0))
        assert peer.fetches == 1
    assert (await rig.status()).counters["peer_blocks_damaged"] == 6


async def take_the_only_row(rig: GatewayRig, request_id: str) -> None:
    """Runs a request whose reader takes nothing, so that others wait until it is aborted."""
    rig.submit(request_id, prompt(1)[:BLOCK], max_tokens=50, credit_tokens=1)
    async with asyncio.timeout(120):
        while not any(load.running_requests for load in (await rig.status()).loads):
            await asyncio.sleep(0.02)


@pytest.mark.full
async def test_a_request_that_waits_has_its_blocks_brought_nearer(
    start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    worker = start_tiers("prefetch", "llama", mesh="prefetch", l3_policy="write_through", max_num_seqs=1)
    async with running_store(servers, "prefetch-store", "prefetch") as store, connect(worker) as rig:
        cold, _ = await ask(rig, "cold", prompt(0))
        await until(rig, "l3_blocks_offloaded", 6)
        await rig.stub.ResetCache(worker_pb2.ResetCacheRequest())
        await take_the_only_row(rig, "stalled")
        rig.submit("waits", prompt(0), max_tokens=4)
        await until(rig, "l2_blocks_prefetched", 6)
        assert not rig.outputs["waits"]
        gets = store.gets
        rig.send(aborts=[key("stalled")])
        await rig.finished("waits")
        assert rig.tokens("waits") == cold
        assert rig.outputs["waits"][0].cached.l2 == 6 * BLOCK
        assert store.gets == gets, "nothing is fetched twice"
        await rig.until_idle()


@pytest.mark.full
async def test_two_ranks_copy_alike_and_give_their_blocks_to_one(start_tiers: StartTiers, connect: Connect) -> None:
    pair = start_tiers("tier-pair", "llama", tp_size=2)
    alone = start_tiers("tier-alone", "llama", l2_memory_bytes=0)
    async with connect(pair) as source, connect(alone) as rig:
        cold, _ = await ask(source, "cold", prompt(0))
        await until(source, "l2_blocks_saved", 6)
        held = common_pb2.BlockSource(holder=source.target(), num_blocks=6)
        assert await ask(rig, "joined", prompt(0), block_sources=[held]) == (cold, (0, 6 * BLOCK))
        for number in range(1, 4):
            await ask(source, f"other-{number}", prompt(number))
        warm, (from_l1, from_l2) = await ask(source, "warm", prompt(0))
        assert (warm, from_l1 + from_l2) == (cold, 6 * BLOCK)
        assert from_l2 >= 4 * BLOCK
        await source.until_idle()
        await rig.until_idle()


@pytest.mark.full
async def test_what_one_rank_stored_two_find_in_kvstore_and_the_reverse(
    start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    # Of a model with a window and a state beside its blocks.
    more = {"mesh": "splits", "l3_policy": "write_through", "l2_memory_bytes": 0}
    pair, alone = start_tiers("split-pair", "toy", tp_size=2, **more), start_tiers("split-alone", "toy", **more)
    async with running_store(servers, "split-store", "splits") as store, connect(pair) as two, connect(alone) as one:
        for number, (writer, reader) in enumerate(((two, one), (one, two))):
            cold, _ = await ask(writer, "cold", prompt(number))
            await until(writer, "l3_blocks_offloaded", 6)
            stored = set(store.blocks)
            reader.submit("warm", prompt(number), max_tokens=4)
            await reader.finished("warm")
            assert (reader.tokens("warm"), reader.outputs["warm"][0].cached.l3) == (cold, 6 * BLOCK)
            # It is not written down again in the reader's split.
            await until(reader, "l3_blocks_present", 6)
            await reader.until_idle()
            assert set(store.blocks) == stored
            for rig in (one, two):
                rig.outputs.clear()


@pytest.mark.full
@pytest.mark.parametrize("readers_ranks", [1, 2])
async def test_a_request_that_waits_has_blocks_of_another_split_brought_nearer(
    readers_ranks: int, start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    # Of a model with a window and a state beside its blocks.
    mesh = f"prefetch-{readers_ranks}"
    more = {"mesh": mesh, "l3_policy": "write_through"}
    writer = start_tiers(f"{mesh}-w", "toy", tp_size=3 - readers_ranks, l2_memory_bytes=0, **more)
    reader = start_tiers(f"{mesh}-r", "toy", tp_size=readers_ranks, max_num_seqs=1, **more)
    async with running_store(servers, f"{mesh}-s", mesh), connect(writer) as source, connect(reader) as rig:
        cold, _ = await ask(source, "cold", prompt(0))
        await until(source, "l3_blocks_offloaded", 6)
        await take_the_only_row(rig, "stalled")
        rig.submit("waits", prompt(0), max_tokens=4)
        await until(rig, "l2_blocks_prefetched", 6)
        rig.send(aborts=[key("stalled")])
        await rig.finished("waits")
        assert (rig.tokens("waits"), rig.outputs["waits"][0].cached.l2) == (cold, 6 * BLOCK)
        await source.until_idle()
        await rig.until_idle()


@pytest.mark.full
async def test_what_l2_has_and_what_kvstore_has_are_joined(
    start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    worker = start_tiers("joined", "llama", mesh="joined", l3_policy="write_through", l2_memory_bytes=L2_OF_FOUR_BLOCKS)
    async with running_store(servers, "joined-store", "joined"), connect(worker) as rig:
        cold, _ = await ask(rig, "cold", prompt(0))
        await until(rig, "l3_blocks_offloaded", 6)
        for number in range(1, 4):
            await ask(rig, f"other-{number}", prompt(number))
        await rig.until_idle()
        rig.submit("warm", prompt(0), max_tokens=4)
        await rig.finished("warm")
        cached = rig.outputs["warm"][0].cached
        assert rig.tokens("warm") == cold
        assert cached.l1 + cached.l2 + cached.l3 == 6 * BLOCK
        assert cached.l3 >= 2 * BLOCK
        await rig.until_idle()


@pytest.mark.full
async def test_what_was_hit_often_enough_goes_to_kvstore(
    start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    worker = start_tiers("hit", "llama", mesh="hit", l3_policy="after_hits", write_down_hits=2, l2_memory_bytes=0)
    async with running_store(servers, "hit-store", "hit") as store, connect(worker) as rig:
        cold, _ = await ask(rig, "cold", prompt(0))
        assert await ask(rig, "hit-1", prompt(0)) == (cold, (6 * BLOCK, 0))
        await ask(rig, "other", prompt(1))
        await rig.until_idle()
        assert not store.blocks, "one hit is not enough"
        assert await ask(rig, "hit-2", prompt(0)) == (cold, (6 * BLOCK, 0))
        await until(rig, "l3_blocks_offloaded", 6)
        await rig.stub.ResetCache(worker_pb2.ResetCacheRequest())
        rig.submit("warm", prompt(0), max_tokens=4)
        await rig.finished("warm")
        assert (rig.tokens("warm"), rig.outputs["warm"][0].cached.l3) == (cold, 6 * BLOCK)
        await rig.until_idle()
        assert (await rig.status()).counters["l3_blocks_offloaded"] == 6, "what was asked once stays out"


@pytest.mark.full
async def test_what_is_about_to_leave_l2_is_demoted_to_kvstore(
    start_tiers: StartTiers, servers: Servers, connect: Connect
) -> None:
    memory = 48 * BLOCK * KV_BYTES_PER_TOKEN
    worker = start_tiers("demoted", "llama", mesh="demoted", l3_policy="on_eviction", l2_memory_bytes=memory)
    async with running_store(servers, "demoted-store", "demoted"), connect(worker) as rig:
        cold, _ = await ask(rig, "cold", prompt(0))
        for number in range(1, 9):
            await until(rig, "l2_blocks_saved", 6 * number)
            # Nothing goes down while there is room; at seven eighths the coldest prompt does.
            if number < 7:
                assert (await rig.status()).counters.get("l3_blocks_offloaded", 0) == 0
            await ask(rig, f"other-{number}", prompt(number))
        await until(rig, "l2_blocks_evicted", 6)
        await until(rig, "l3_blocks_offloaded", 6)
        rig.submit("warm", prompt(0), max_tokens=4)
        await rig.finished("warm")
        assert rig.tokens("warm") == cold
        assert rig.outputs["warm"][0].cached.l3 == 6 * BLOCK
        await rig.until_idle()
