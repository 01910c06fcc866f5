"""A prefix computed once is found everywhere: two prefill and two decode instances over two kvstores, real model."""

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from harness.fixtures import kept
from harness.running import RunningCluster
from integration.reference import prompt_of

from tidemill.client import Client
from tidemill.completion import Completion
from tidemill.errors import TidemillError
from tidemill.mesh.v1 import membership_pb2, worker_pb2, worker_pb2_grpc
from tidemill_kvcache.hashing import chain_root, hash_blocks, tenant_salt
from tidemill_local import cache_view, processes
from tidemill_worker.model_files import read_model_files
from tidemill_worker.rendezvous import choose, lookups

BLOCK = 16
OUTPUT = 8
TURNS = 20
TURN_TOKENS = 21
ROOT = bytes(16)
USERS = 4
STORES = ("kvstore-1", "kvstore-2")
JOINING = ("kvstore-3", "kvstore-4")
# Keys of two tenants, the first of whom has two; all else is asked by the first.
ONE, ALSO_ONE, TWO = "sk-one", "sk-also-one", "sk-two"
# What the tiny model's context has room for, and SmolLM2's.
SYSTEM_TOKENS = {"llama": 768, "smollm2": 2048}
WORKER = {
    "block_size": BLOCK,
    "max_num_batched_tokens": 256,
    "kv_memory_bytes": 96 << 20,
    "l2_memory_bytes": 32 << 20,
    "onboard_min_blocks": 1,
    # What is quicker depends on the machine; what can be found does not.
    "onboard_choice": "always",
    "onboard_deadline_s": 60.0,
    "l3_timeout_s": 60.0,
}


class Oracle:
    """What a cache that forgets nothing and is everywhere would find."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def hit_tokens(self, prompt: list[int]) -> int:
        """Leading tokens that need not be computed; the last one always is, for its logits."""
        hashes = hash_blocks(ROOT, prompt[:-1], BLOCK)
        return BLOCK * next((i for i, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))

    def answered(self, prompt: list[int], output: list[int]) -> None:
        """The KV of the last output token is never computed."""
        self._seen |= set(hash_blocks(ROOT, [*prompt, *output[:-1]], BLOCK))


@pytest.fixture(scope="module", params=["llama", pytest.param("smollm2", marks=pytest.mark.full)])
def mesh(
    checkpoint: Callable[[str], Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """Nobody replaces a killed worker; gateways ask for keys."""
    model = request.getfixturevalue("smollm2") if request.param == "smollm2" else checkpoint("llama")
    worker = WORKER if request.param == "llama" else {**WORKER, "kv_memory_bytes": 512 << 20}
    keys = tmp_path_factory.mktemp("keys") / "api_keys"
    keys.write_text(f"{ONE} one\n{ALSO_ONE} one\n{TWO} two\n")
    settings = {
        "gateway": {"api_keys_file": str(keys)},
        "prefill": worker,
        "decode": {**worker, "l3_policy": "write_through"},
    }
    made = RunningCluster.start(model, prefill=2, decode=2, kvstores=2, autoscalers=0, settings=settings)
    with kept(made):
        yield made


async def ask(mesh: RunningCluster, prompt: list[int], key: str = ONE) -> Completion:
    """A greedy answer, once everything that earlier ones left has been written down."""
    async with Client(mesh.grpc, key) as client:
        answer = await client.complete(
            model=mesh.model,
            token_ids=prompt,
            max_tokens=OUTPUT,
            temperature=0.0,
            ignore_eos=True,
            include_placement=True,
        )
    await mesh.holds_are_zero()
    return answer


def cached(answer: Completion) -> int:
    """Prompt tokens that were not computed, from any tier."""
    usage = answer.usage
    return int(usage.cached_tokens_l1 + usage.cached_tokens_l2 + usage.cached_tokens_l3)


async def counters(mesh: RunningCluster, instance: str) -> dict[str, Any]:
    """A worker's counters."""
    return dict((await mesh.look()).members[instance].status.counters)


async def test_a_conversation_hits_what_the_oracle_predicts(mesh: RunningCluster) -> None:
    oracle, history = Oracle(), prompt_of("a conversation", 100)
    found, expected = [], []
    for turn in range(TURNS):
        history = history + prompt_of(f"turn {turn}", TURN_TOKENS)
        expected.append(oracle.hit_tokens(history))
        answer = await ask(mesh, history)
        found.append(cached(answer))
        oracle.answered(history, answer.choices[0].token_ids)
        history = history + answer.choices[0].token_ids
    assert found == expected
    assert sum(found) > 0.85 * sum(100 + (TURN_TOKENS + OUTPUT) * turn for turn in range(TURNS))


async def test_a_shared_system_prompt_is_computed_once(mesh: RunningCluster) -> None:
    system_tokens = SYSTEM_TOKENS["smollm2" if "smol" in mesh.model.lower() else "llama"]
    oracle, system = Oracle(), prompt_of("a system prompt", system_tokens)
    for user in range(USERS):
        prompt = system + prompt_of(f"user {user}", 30)
        expected = oracle.hit_tokens(prompt)
        answer = await ask(mesh, prompt)
        assert cached(answer) == expected
        oracle.answered(prompt, answer.choices[0].token_ids)
    shown = cache_view.render(await mesh.look())
    assert all(f"{role}-{number}" in shown for role in ("prefill", "decode", "kvstore") for number in (1, 2))
    top = [row.split() for row in shown.split("PREFIX")[1].splitlines()[1:]]
    assert any(int(row[1]) == system_tokens and int(row[2]) >= 1 for row in top), shown


@pytest.mark.parametrize("mesh", ["llama"], indirect=True)
async def test_another_tenants_prompts_cannot_be_seen(mesh: RunningCluster) -> None:
    """Neither in what usage says, nor in what a prompt takes: all of it is computed, whoever computed it before."""
    prompt, by_http = prompt_of("a secret", 300), prompt_of("a secret by HTTP", 300)
    mine = await ask(mesh, prompt)
    assert cached(await ask(mesh, prompt)) == 288
    before = await total_work(mesh)
    theirs = await ask(mesh, prompt, TWO)
    assert theirs.choices[0].token_ids == mine.choices[0].token_ids
    assert cached(theirs) == 0
    assert await total_work(mesh) - before == len(prompt)
    assert cached(await ask(mesh, prompt, TWO)) == 288, "a tenant's own are cached as ever"
    assert cached(await ask(mesh, prompt, ALSO_ONE)) == 288, "keys of one name share, as the deployment has chosen"
    async with httpx2.AsyncClient(base_url=f"http://{mesh.http}", timeout=300) as http:
        body = {"model": mesh.model, "prompt": by_http, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        details = []
        for key in (ONE, ONE, TWO):
            answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            details.append(answer.json()["usage"]["prompt_tokens_details"])
            await mesh.holds_are_zero()
        assert [found["cached_tokens"] for found in details] == [0, 288, 0]
        assert set(details[2].values()) == {0}
        # Counters of all tenants are for operators, on ports of their own.
        for headers in ({}, {"authorization": f"Bearer {TWO}"}):
            assert (await http.get("/metrics", headers=headers)).status_code == 404
        assert (await http.post("/v1/completions", json=body)).status_code == 401
    async with Client(mesh.grpc) as client:
        with pytest.raises(TidemillError, match="API key"):
            await client.complete(model=mesh.model, token_ids=prompt, max_tokens=1)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["llama"], indirect=True)
async def test_a_kvstore_may_join_and_die_at_any_time(mesh: RunningCluster) -> None:
    """Every answer is the cold one; what comes from L3 is what the stores that live have."""
    prompts = [prompt_of(f"stored by two, {number}", 300) for number in range(6)]
    cold = [(await ask(mesh, prompt)).choices[0].token_ids for prompt in prompts]

    async def from_l3(number: int) -> int:
        await forget(mesh)
        answer = await ask(mesh, prompts[number])
        assert answer.choices[0].token_ids == cold[number]
        return int(answer.usage.cached_tokens_l3)

    assert await from_l3(0) == 288
    # The store that lives has the first blocks of the first prompt.
    homes = [choose(block_hash, STORES) for block_hash in hashes_of(mesh, prompts[0])]
    left = next(index for index, home in enumerate(homes) if home != homes[0])
    victim = next(name for name in STORES if name != homes[0])
    members = (await mesh.look()).members
    await forget(mesh)
    wave = [asyncio.create_task(ask(mesh, prompt)) for prompt in prompts[1:3]]
    mesh.kill(victim)
    try:
        assert [(await answer).choices[0].token_ids for answer in wave] == cold[1:3], "while it dies"
        assert await from_l3(0) == left * BLOCK
        assert await from_l3(0) == 288, "what was computed again is stored where somebody lives"
    finally:
        await asyncio.to_thread(mesh.restart, victim)
    await mesh.until_members(*members)
    # What it had is still on its disk. Each prompt is asked once: then the other store has all of it.
    assert 288 in [await from_l3(number) for number in (3, 4)]
    # One that joins takes over a part of the blocks, which stay where they are and are found there.
    record = mesh.add_worker("kvstore", "kvstore-3")
    try:
        await mesh.until_members(*members, "kvstore-3")
        assert [await from_l3(number) for number in (5, 0)] == [288, 288]
        for number in range(10):
            await ask(mesh, prompt_of(f"stored by three, {number}", 300))
            if (await status_of(mesh, "kvstore-3")).blocks:
                break
        assert (await status_of(mesh, "kvstore-3")).blocks > 0
    finally:
        processes.send(record, signal.SIGTERM)
        assert await asyncio.to_thread(processes.wait_gone, record, 60.0)
    await mesh.until_members(*members)
    assert await from_l3(5) == 288


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["llama"], indirect=True)
async def test_two_kvstores_that_join_at_once_cost_no_hit_and_one_may_die_right_after(mesh: RunningCluster) -> None:
    """Blocks of which both are a better choice than the store that has them are loaded from there all the same."""
    names = (f"left behind by two, {number}" for number in itertools.count())
    made = (prompt_of(name, 300) for name in names)
    prompts = list(itertools.islice((prompt for prompt in made if left_behind(mesh, prompt)), 4))
    cold = {number: (await ask(mesh, prompt)).choices[0].token_ids for number, prompt in enumerate(prompts)}

    async def from_l3(number: int) -> int:
        await forget(mesh)
        answer = await ask(mesh, prompts[number])
        assert answer.choices[0].token_ids == cold[number]
        return int(answer.usage.cached_tokens_l3)

    async def read(name: str) -> int:
        return int((await status_of(mesh, name)).counters.get("blocks_hit", 0))

    members = (await mesh.look()).members
    joined = {name: mesh.add_worker("kvstore", name) for name in JOINING}
    try:
        await mesh.until_members(*members, *JOINING)
        before = {name: await read(name) for name in STORES}
        assert await from_l3(0) == 288
        homes = [choose(block_hash, STORES) for block_hash in hashes_of(mesh, prompts[0])]
        given = {name: await read(name) - before[name] for name in STORES}
        assert all(given[name] >= homes.count(name) for name in STORES), (given, homes)
        assert [await read(name) for name in JOINING] == [0, 0]
        # One of them dies, first while prompts are on their way, and is gone then.
        await forget(mesh)
        wave = [asyncio.create_task(ask(mesh, prompt)) for prompt in prompts[:2]]
        processes.send(joined["kvstore-4"], signal.SIGKILL)
        answers = [await answer for answer in wave]
        assert [answer.choices[0].token_ids for answer in answers] == [cold[0], cold[1]], "while it dies"
        assert await from_l3(2) == 288
        await mesh.until_members(*members, "kvstore-3")
        assert await from_l3(3) == 288
    finally:
        for record in joined.values():
            processes.send(record, signal.SIGTERM)
        for record in joined.values():
            assert await asyncio.to_thread(processes.wait_gone, record, 60.0)
    await mesh.until_members(*members)
    assert [await from_l3(number) for number in range(4)] == [288] * 4


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["llama"], indirect=True)
async def test_bytes_that_change_on_a_stores_disk_cost_hits_and_change_no_token(mesh: RunningCluster) -> None:
    prompt = prompt_of("damaged on disk", 300)
    cold = await ask(mesh, prompt)
    await forget(mesh)
    before = {name: (await status_of(mesh, name)).counters for name in STORES}
    for path in mesh.home.data.glob("kvstore-*/*.segment"):
        # At least one byte of every block.
        with path.open("r+b") as segment:
            for offset in range(0, path.stat().st_size, 2000):
                segment.seek(offset)
                byte = segment.read(1)
                segment.seek(offset)
                segment.write(bytes([byte[0] ^ 1]))
    again = await ask(mesh, prompt)
    assert again.choices[0].token_ids == cold.choices[0].token_ids
    assert again.usage.cached_tokens_l3 == 0
    damaged = [(await status_of(mesh, name)).counters["damaged_blocks"] for name in STORES]
    assert sum(damaged) > sum(counted.get("damaged_blocks", 0) for counted in before.values())
    # What was computed again is stored again.
    await forget(mesh)
    stored = await ask(mesh, prompt)
    assert stored.usage.cached_tokens_l3 > 0, (stored.usage, stored.placement)


async def test_what_a_killed_instance_computed_comes_from_l3(mesh: RunningCluster) -> None:
    """The last test of this file: what it kills stays dead."""
    prompt = prompt_of("survives its instance", 300)
    oracle = Oracle()
    cold = await ask(mesh, prompt)
    assert cached(cold) == 0
    oracle.answered(prompt, [])
    again = await ask(mesh, prompt)
    assert again.choices[0].token_ids == cold.choices[0].token_ids
    assert cached(again) == oracle.hit_tokens(prompt)
    gone = {cold.placement.prefill_instance, cold.placement.decode_instance} | {again.placement.decode_instance}
    gone.discard("")
    for name in gone:
        mesh.kill(name)
    left = [name for name in ("prefill-1", "prefill-2", "decode-1", "decode-2") if name not in gone]
    await mesh.until_members("gateway-1", "router-1", "kvstore-1", "kvstore-2", *left)
    before = {name: await counters(mesh, name) for name in left}
    elsewhere = await ask(mesh, prompt)
    assert elsewhere.choices[0].token_ids == cold.choices[0].token_ids
    assert elsewhere.usage.cached_tokens_l3 == oracle.hit_tokens(prompt)
    after = {name: await counters(mesh, name) for name in left}
    computed = sum(work_of(after[name]) - work_of(before[name]) for name in left)
    assert computed == len(prompt) - oracle.hit_tokens(prompt)


async def total_work(mesh: RunningCluster) -> int:
    """Prompt tokens that all workers have computed."""
    view = await mesh.look()
    workers = view.with_role(membership_pb2.ROLE_PREFILL, membership_pb2.ROLE_DECODE)
    return sum(work_of(dict(member.status.counters)) for member in workers)


def work_of(counted: dict[str, Any]) -> int:
    """Prompt tokens that a worker has computed."""
    saved = sum(counted.get(f"cached_tokens_{tier}", 0) for tier in ("l1", "l2", "l3"))
    return int(counted.get("prompt_tokens", 0) - saved)


async def forget(mesh: RunningCluster) -> None:
    """Empties L1 and L2 of all workers."""
    view = await mesh.look()
    for member in view.with_role(membership_pb2.ROLE_PREFILL, membership_pb2.ROLE_DECODE):
        async with grpc.aio.insecure_channel(member.record.endpoint) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetCache(worker_pb2.ResetCacheRequest())


def hashes_of(mesh: RunningCluster, prompt: list[int]) -> list[bytes]:
    """Of the blocks of the first tenant's prompt that can be found."""
    secret = mesh.home.secret_file.read_text().strip()
    root = chain_root(read_model_files(Path(mesh.spec.model)).hash_root, tenant_salt(secret, "one"))
    return hash_blocks(root, prompt[:-1], BLOCK)


def left_behind(mesh: RunningCluster, prompt: list[int]) -> list[int]:
    """Indices of the prompt's blocks whose store is no longer among their first two once both others have joined."""
    hashes = hashes_of(mesh, prompt)
    asked = lookups(hashes, [*STORES, *JOINING], 2)
    return [at for at, block_hash in enumerate(hashes) if at not in asked[choose(block_hash, STORES)]]


async def status_of(mesh: RunningCluster, instance: str) -> Any:
    """An instance's answer to its status call."""
    return (await mesh.look()).members[instance].status
