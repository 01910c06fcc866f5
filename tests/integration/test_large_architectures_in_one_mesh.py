"""Experts, latents, indexers and compressed streams behind one gateway, prefill and decode apart: tokens are right."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.fixtures import kept
from harness.oracle_checkpoints import make_oracle
from harness.running import RunningCluster
from integration.model_meshes import ask, check_blocks_come_back_from_kvstore, until_ready
from integration.reference import FP32_BOUND, Transformers, check_greedy, prompt_of

pytestmark = pytest.mark.full

ARCHITECTURES = ("deepseek_v4", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "qwen3_moe")
# Latents belong to no head: each rank holds all of them, and a piece may come from any.
LAYOUTS: dict[tuple[str, str], dict[str, int]] = {
    ("prefill", "deepseek_v3"): {"tp_size": 2},
    ("decode", "glm_moe_dsa"): {"tp_size": 2},
}
WORKER = {
    "block_size": 16,
    "max_num_batched_tokens": 48,
    "onboard_deadline_s": 20.0,
    "onboard_choice": "always",  # small models compute faster than they load
    "num_blocks": 96,
}
# An indexer may choose between two rows that sums in another order part.
INDEXED_BOUND = 0.05
BOUNDS = {name: FP32_BOUND if name in ("deepseek_v3", "qwen3_moe") else INDEXED_BOUND for name in ARCHITECTURES}
PROMPT_TOKENS = 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each architecture, by its name."""
    root = tmp_path_factory.mktemp("oracles")
    return {name: make_oracle(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Transformers]:
    """Right logits by architecture."""
    torch.set_num_threads(1)
    return {name: Transformers(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def mesh(folders: dict[str, Path]) -> Iterator[RunningCluster]:
    """A prefill and a decode instance for each. Each prompt goes through prefill, even one that decode holds."""
    first, *others = ARCHITECTURES
    settings = {"prefill": WORKER, "decode": WORKER, "router": {"direct_uncached_tokens": 0}}
    made = RunningCluster.start(folders[first], autoscalers=0, settings=settings)
    with kept(made):
        for name in others:
            for role in ("prefill", "decode"):
                layout = LAYOUTS.get((role, name), {})
                made.add_worker(role, worker_of(role, name), model=str(folders[name]), model_name=name, **layout)
            # One model after the other: the ranks of all at once take minutes to import torch on two cores.
            asyncio.run(made.until_members(*made.launched()))
        asyncio.run(until_ready(made, ARCHITECTURES, timeout_s=300.0))
        yield made


def worker_of(role: str, name: str) -> str:
    """The cluster's own pair serves the first architecture."""
    return f"{role}-1" if name == ARCHITECTURES[0] else f"{role}-{name.replace('_', '-')}"


@pytest.mark.parametrize("model", ARCHITECTURES)
async def test_tokens_are_right_through_chunks_hand_over_and_prefix_hits(mesh, references, model):
    first = prompt_of(f"first turn of {model}", PROMPT_TOKENS)
    answer = await ask(mesh, model, first)
    assert answer.placement.prefill_instance == worker_of("prefill", model)
    assert answer.placement.decode_instance == worker_of("decode", model)
    check_greedy(references[model], first, answer.choices[0], BOUNDS[model])

    second = [*first, *answer.choices[0].token_ids, *prompt_of("next turn", 30)]
    follow_up = await ask(mesh, model, second)
    check_greedy(references[model], second, follow_up.choices[0], BOUNDS[model])
    # All full blocks of the first prompt, which is also where the streams' last snapshot was taken.
    assert follow_up.usage.cached_tokens_l1 == 192


@pytest.mark.parametrize("model", ARCHITECTURES)
async def test_blocks_come_back_from_kvstore_after_the_pools_are_emptied(mesh, references, model):
    prompt = prompt_of(f"stored by {model}", PROMPT_TOKENS)
    workers = [worker_of(role, model) for role in ("prefill", "decode")]
    await check_blocks_come_back_from_kvstore(mesh, model, workers, references[model], prompt, BOUNDS[model], 192)


@pytest.mark.parametrize("model", ARCHITECTURES)
async def test_requests_in_one_batch_do_not_disturb_each_other(mesh, references, model):
    prompts = [prompt_of(f"together {i}", 20 + 37 * i) for i in range(5)]
    answers = await asyncio.gather(*(ask(mesh, model, prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(references[model], prompt, answer.choices[0], BOUNDS[model])
    await mesh.holds_are_zero()
