"""Three models in one mesh, each with another layout of its workers: requests find theirs and get the right tokens."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from harness.fixtures import LIVE
from harness.naive_toy import NaiveToy
from harness.running import START_TIMEOUT_S, RunningCluster
from integration.reference import BF16_BOUND, FP32_BOUND, Reference, Transformers, check_greedy, prompt_of

from tidemill.completion import Completion
from tidemill.errors import TidemillError
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill.v1 import errors_pb2
from tidemill_local.mesh_view import MeshView

pytestmark = pytest.mark.timeout(300)

TOY, LLAMA, QWEN = "tiny-toy", "tiny-llama", "tiny-qwen3"
# By model: what its prefill and its decode instance are told.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    # Long prompts take several chunks, and few requests fill decode's pool.
    TOY: {"prefill": {"num_blocks": 96}, "decode": {"num_blocks": 42}},
    # Few seats, so that decode needs both of its domains.
    LLAMA: {"prefill": {"tp_size": 2}, "decode": {"dp_size": 2, "max_num_seqs": 3}},
    QWEN: {"prefill": {"dp_size": 2}, "decode": {"tp_size": 2, "kv_dtype": "bfloat16"}},
}
BOUNDS = {TOY: FP32_BOUND, LLAMA: FP32_BOUND, QWEN: BF16_BOUND}
# A busy machine may take its time to fetch blocks; a request that gives up waiting computes them.
WORKER = {"block_size": 16, "max_num_batched_tokens": 48, "onboard_deadline_s": 20.0}
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 40


@pytest.fixture(scope="module")
def references(checkpoint: Callable[[str], Path]) -> dict[str, Reference]:
    """Right logits by model."""
    torch.set_num_threads(1)
    return {
        TOY: NaiveToy(checkpoint("toy")),
        LLAMA: Transformers(checkpoint("llama")),
        QWEN: Transformers(checkpoint("qwen3")),
    }


@pytest.fixture(scope="module")
def mesh(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    """A mesh that serves all three. Each prompt goes through prefill, even one that decode holds."""
    settings = {"prefill": WORKER | LAYOUTS[TOY]["prefill"], "decode": WORKER | LAYOUTS[TOY]["decode"]}
    made = RunningCluster.start(
        checkpoint("toy"), autoscalers=0, settings=settings | {"router": {"direct_uncached_tokens": 0}}
    )
    LIVE.append(made)
    try:
        for model in (LLAMA, QWEN):
            architecture = model.removeprefix("tiny-")
            names = {
                "model": str(checkpoint(architecture)),
                "model_name": model,
                "aliases": f"{architecture},any-{architecture}",
            }
            for role, layout in LAYOUTS[model].items():
                made.add_worker(role, f"{role}-{architecture}", num_blocks=0, **names, **layout)
        asyncio.run(made.until_members(*everyone()))
        asyncio.run(until_ready(made))
        yield made
    finally:
        LIVE.remove(made)
        made.remove()


def everyone() -> list[str]:
    workers = [f"{role}-{name}" for role in ("prefill", "decode") for name in ("1", "llama", "qwen3")]
    return ["gateway-1", "router-1", "kvstore-1", *workers]


def workers_of(model: str) -> tuple[str, str]:
    """The prefill and the decode instance that serve a model."""
    name = "1" if model == TOY else model.removeprefix("tiny-")
    return f"prefill-{name}", f"decode-{name}"


async def until_ready(mesh: RunningCluster) -> None:
    """Waits until the gateway lists all models as ready."""
    async with mesh.client() as client, asyncio.timeout(60.0):
        while {model.name for model in await client.models() if model.ready} != set(LAYOUTS):
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


async def reset_caches(mesh: RunningCluster, model: str) -> None:
    """Empties L1 of a model's workers."""
    for instance in workers_of(model):
        async with grpc.aio.insecure_channel(mesh.cluster.endpoint(instance)) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetCache(worker_pb2.ResetCacheRequest(), timeout=10.0)


def loads(view: MeshView, instance: str) -> list[Any]:
    return list(view.members[instance].status.loads)


def epochs(view: MeshView, instance: str) -> list[str]:
    return [domain.epoch for domain in view.members[instance].record.domains]


async def test_each_request_goes_to_the_workers_of_its_model(mesh, references):
    prompt = prompt_of("which model", 60)
    answers = await asyncio.gather(*(ask(mesh, model, prompt) for model in LAYOUTS))
    for model, answer in zip(LAYOUTS, answers, strict=True):
        assert answer.model.startswith(model)
        assert (answer.placement.prefill_instance, answer.placement.decode_instance) == workers_of(model)
        check_greedy(references[model], prompt, answer.choices[0], BOUNDS[model])


async def test_models_are_listed_and_found_by_name_and_alias(mesh):
    async with mesh.client() as client:
        listed = {model.name: model for model in await client.models()}
        assert set(listed) == set(LAYOUTS)
        assert all(model.ready and model.vocab_size == 264 for model in listed.values())
        assert set(listed[QWEN].aliases) == {"qwen3", "any-qwen3"}
        assert (await client.model("any-llama")).name == LLAMA
        by_alias = await client.complete(model="qwen3", text="hello", max_tokens=3, include_placement=True)
        assert by_alias.placement.prefill_instance == "prefill-qwen3"
        with pytest.raises(TidemillError) as unknown:
            await client.model("any-toy")
    assert unknown.value.code == errors_pb2.ERROR_CODE_MODEL_NOT_FOUND


@pytest.mark.parametrize("model", [TOY, LLAMA, QWEN])
async def test_tokens_are_right_through_chunks_hand_over_and_prefix_hits(mesh, references, model):
    first = prompt_of(f"first turn of {model}", PROMPT_TOKENS)
    answer = await ask(mesh, model, first)
    check_greedy(references[model], first, answer.choices[0], BOUNDS[model])

    second = [*first, *answer.choices[0].token_ids, *prompt_of("next turn", 30)]
    follow_up = await ask(mesh, model, second)
    check_greedy(references[model], second, follow_up.choices[0], BOUNDS[model])
    # All full blocks of the first prompt; for the toy, up to its last snapshot.
    assert follow_up.usage.cached_tokens_l1 == 192
    assert (follow_up.placement.prefill_instance, follow_up.placement.decode_instance) == workers_of(model)


@pytest.mark.parametrize("model", [TOY, LLAMA, QWEN])
async def test_blocks_come_back_from_kvstore_after_the_pools_are_emptied(mesh, references, model):
    prompt = prompt_of(f"stored by {model}", PROMPT_TOKENS)
    before = await ask(mesh, model, prompt)
    # Offloads are holds: none left means that all is stored.
    await mesh.holds_are_zero()
    await reset_caches(mesh, model)

    after = await ask(mesh, model, prompt)
    check_greedy(references[model], prompt, after.choices[0], BOUNDS[model])
    assert after.choices[0].token_ids == before.choices[0].token_ids
    assert (before.usage.cached_tokens_l3, after.usage.cached_tokens_l1) == (0, 0)
    assert after.usage.cached_tokens_l3 == 192


async def test_blocks_survive_a_killed_kvstore(mesh, references):
    prompt = prompt_of("stored for long", PROMPT_TOKENS)
    before = await ask(mesh, LLAMA, prompt)
    await mesh.holds_are_zero()
    mesh.kill("kvstore-1")
    await reset_caches(mesh, LLAMA)
    await asyncio.to_thread(mesh.restart, "kvstore-1")
    await mesh.until_members(*everyone())

    after = await ask(mesh, LLAMA, prompt)
    check_greedy(references[LLAMA], prompt, after.choices[0], BOUNDS[LLAMA])
    assert after.choices[0].token_ids == before.choices[0].token_ids
    assert after.usage.cached_tokens_l3 == 192


async def test_a_full_pool_preempts_and_tokens_stay_right(mesh, references):
    # Any two of them grow beyond the pool together.
    prompts = [prompt_of(f"preempted {i}", 40) for i in range(5)]
    answers = await asyncio.gather(*(ask(mesh, TOY, prompt, max_tokens=320) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(references[TOY], prompt, answer.choices[0], BOUNDS[TOY])
    async with asyncio.timeout(10.0):
        while not any(load.preemptions_total for load in loads(await mesh.look(), "decode-1")):
            await asyncio.sleep(0.2)
    await mesh.holds_are_zero()


@pytest.mark.parametrize(("model", "role"), [(LLAMA, 1), (QWEN, 0)], ids=["decode", "prefill"])
async def test_both_cache_domains_of_an_instance_take_requests(mesh, references, model, role):
    instance = workers_of(model)[role]
    total = "output_tokens_total" if role else "prompt_tokens_total"
    before = [getattr(load, total) for load in loads(await mesh.look(), instance)]
    prompts = [prompt_of(f"spread {model} {i}", 100) for i in range(8)]
    answers = await asyncio.gather(*(ask(mesh, model, prompt, max_tokens=120) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(references[model], prompt, answer.choices[0], BOUNDS[model])

    assert len(before) == 2
    async with asyncio.timeout(10.0):
        # Reports follow the answers.
        while not all(
            getattr(load, total) > then for load, then in zip(loads(await mesh.look(), instance), before, strict=True)
        ):
            await asyncio.sleep(0.2)


async def test_a_lost_rank_ends_the_epoch_of_its_own_domain_only(mesh, references):
    before = epochs(await mesh.look(), "decode-llama")
    assert len(set(before)) == 2
    mesh.kill_rank("decode-llama")

    # The other domain serves meanwhile.
    prompts = [prompt_of(f"after a loss {i}", 60) for i in range(4)]
    answers = await asyncio.gather(*(ask(mesh, LLAMA, prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(references[LLAMA], prompt, answer.choices[0], BOUNDS[LLAMA])

    async with asyncio.timeout(START_TIMEOUT_S):
        while len(after := epochs(await mesh.look(), "decode-llama")) != 2 or after == before:
            await asyncio.sleep(0.5)
    assert len(set(after) & set(before)) == 1
    await mesh.holds_are_zero()
