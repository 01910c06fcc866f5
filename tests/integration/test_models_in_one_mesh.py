"""Three models in one mesh, each with another layout of its workers: requests find theirs and get the right tokens."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fixtures import kept
from harness.naive_toy import NaiveToy
from harness.running import START_TIMEOUT_S, RunningCluster
from integration.model_meshes import (
    ask,
    check_blocks_come_back_from_kvstore,
    credited_tokens,
    reset_caches,
    router_knows_blocks_of,
    until_ready,
)
from integration.reference import BF16_BOUND, FP32_BOUND, Reference, Transformers, check_greedy, prompt_of

from tidemill.errors import TidemillError
from tidemill.v1 import errors_pb2
from tidemill_local.mesh_view import MeshView

TOY, LLAMA, QWEN = "tiny-toy", "tiny-llama", "tiny-qwen3"
# By model: what its prefill and its decode instance are told.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    # Long prompts take several chunks, and few requests fill decode's pool.
    # Two prompts leave as many snapshots as prefill has room for.
    TOY: {"prefill": {"num_blocks": 96, "num_snapshots": 6}, "decode": {"num_blocks": 42}},
    # Few seats, so that decode needs both of its domains.
    LLAMA: {"prefill": {"tp_size": 2}, "decode": {"dp_size": 2, "max_num_seqs": 3}},
    QWEN: {"prefill": {"dp_size": 2}, "decode": {"tp_size": 2, "kv_dtype": "bfloat16"}},
}
BOUNDS = {TOY: FP32_BOUND, LLAMA: FP32_BOUND, QWEN: BF16_BOUND}
# A busy machine may take its time to fetch blocks; a request that gives up waiting computes them.
# Small models compute faster than they load, so that "predicted" would load only now and then.
WORKER = {"block_size": 16, "max_num_batched_tokens": 48, "onboard_choice": "always"}
WORKER |= {"onboard_deadline_s": 60.0, "l3_timeout_s": 60.0}
PROMPT_TOKENS = 200


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
    with kept(made):
        for model in (LLAMA, QWEN):
            architecture = model.removeprefix("tiny-")
            names = {
                "model": str(checkpoint(architecture)),
                "model_name": model,
                "aliases": f"{architecture},any-{architecture}",
            }
            for role, layout in LAYOUTS[model].items():
                made.add_worker(role, f"{role}-{architecture}", num_blocks=0, **names, **layout)
            # One model after the other: the ranks of all at once take minutes to import torch on two cores.
            asyncio.run(made.until_members(*made.launched()))
        asyncio.run(until_ready(made, LAYOUTS, timeout_s=START_TIMEOUT_S))
        yield made


def everyone() -> list[str]:
    workers = [f"{role}-{name}" for role in ("prefill", "decode") for name in ("1", "llama", "qwen3")]
    return ["gateway-1", "router-1", "kvstore-1", *workers]


def workers_of(model: str) -> tuple[str, str]:
    """The prefill and the decode instance that serve a model."""
    name = "1" if model == TOY else model.removeprefix("tiny-")
    return f"prefill-{name}", f"decode-{name}"


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
    workers = workers_of(model)
    await check_blocks_come_back_from_kvstore(mesh, model, workers, references[model], prompt, BOUNDS[model], 192)


async def test_a_state_is_credited_as_far_as_it_can_be_resumed_and_no_further(mesh, references):
    """Before and after other prompts take the snapshots, while all blocks stay where they are."""
    prompt = prompt_of("resumed", PROMPT_TOKENS)

    async def cached() -> tuple[int, int, int]:
        """Cached tokens in L1 and below it, as usage tells, after the same was credited; and blocks in L1 before."""
        blocks, before = await router_knows_blocks_of(mesh, "prefill-1"), await credited_tokens(mesh)
        answer = await ask(mesh, TOY, prompt)
        after, usage = await credited_tokens(mesh), answer.usage
        check_greedy(references[TOY], prompt, answer.choices[0], BOUNDS[TOY])
        # What was computed or loaded is stored below too before the next look.
        await mesh.holds_are_zero()
        credit = {tier: after[tier] - before.get(tier, 0) for tier in after}
        assert (credit["l1"], credit["l2"]) == (usage.cached_tokens_l1, usage.cached_tokens_l2)
        # Whether a store is the quicker way is a matter of speed for the router, and of what there is for this worker.
        assert credit["l3"] in (0, usage.cached_tokens_l3)
        return usage.cached_tokens_l1, usage.cached_tokens_l2 + usage.cached_tokens_l3, blocks

    assert (await cached())[:2] == (0, 0)
    *warm, blocks = await cached()
    assert warm == [192, 0]
    for number in range(3):
        await ask(mesh, TOY, prompt_of(f"takes the snapshots {number}", PROMPT_TOKENS), max_tokens=1)
    # No block has left, and all of them have their snapshots in a tier below.
    assert await cached() == (0, 192, blocks + 3 * (PROMPT_TOKENS // 16))
    assert (await cached())[:2] == (192, 0)


async def test_blocks_survive_a_killed_kvstore(mesh, references):
    prompt = prompt_of("stored for long", PROMPT_TOKENS)
    before = await ask(mesh, LLAMA, prompt)
    await mesh.holds_are_zero()
    mesh.kill("kvstore-1")
    await reset_caches(mesh, workers_of(LLAMA))
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
    async with asyncio.timeout(180.0):
        while not any(load.preemptions_total for load in loads(await mesh.look(), "decode-1")):
            await asyncio.sleep(0.2)
    await mesh.holds_are_zero()


@pytest.mark.parametrize(("model", "role"), [(LLAMA, 1), (QWEN, 0)], ids=["decode", "prefill"])
async def test_both_cache_domains_of_an_instance_take_requests(mesh, references, model, role):
    instance = workers_of(model)[role]
    total = "output_tokens_total" if role else "prompt_tokens_total"
    before = [getattr(load, total) for load in loads(await mesh.look(), instance)]
    assert len(before) == 2
    wave = 0
    async with asyncio.timeout(START_TIMEOUT_S):
        # Reports follow the answers, and a domain that was slower lately may be passed over for a while.
        while not all(
            getattr(load, total) > then for load, then in zip(loads(await mesh.look(), instance), before, strict=True)
        ):
            wave += 1
            prompts = [prompt_of(f"spread {model} {wave} {i}", 100) for i in range(8)]
            answers = await asyncio.gather(*(ask(mesh, model, prompt, max_tokens=120) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                check_greedy(references[model], prompt, answer.choices[0], BOUNDS[model])


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
