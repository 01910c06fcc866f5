"""Logits, log-probabilities and greedy tokens equal Hugging Face transformers in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill_engine.sampling_params import SamplingParams

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    (
        "qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
    ),
]
IDS = [f"{name}-{'-'.join(str(v) for v in overrides.values())[:40]}" for name, overrides in VARIANTS]
LOGIT_BOUND = 2e-4
"""Logits are of order 10; sums in another order move them by about 1e-5."""


@pytest.fixture(params=VARIANTS, ids=IDS)
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    name, overrides = request.param
    return tiny(name, **overrides)


@pytest.fixture(params=["fp32", "auto"])
def weights(request: pytest.FixtureRequest) -> str:
    """The plain torch path and the C kernels."""
    return str(request.param)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def test_logits_of_every_position_equal_the_reference_whole_and_chunked(
    checkpoint: Path, weights: str, start_runner: Callable[..., Any]
) -> None:
    tokens = prompt(150)
    expected = reference(checkpoint)(torch.tensor([tokens])).logits[0]
    driver = start_runner(checkpoint, weights=weights)
    for chunk in (1000, 64, 17, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


@torch.inference_mode()
def test_greedy_tokens_and_logprobs_equal_the_reference_in_a_mixed_batch(
    checkpoint: Path, weights: str, start_runner: Callable[..., Any]
) -> None:
    model = reference(checkpoint)
    driver = start_runner(checkpoint, weights=weights)
    sampling = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=5)
    prompts = {0: prompt(5, seed=0), 1: prompt(33, seed=1), 2: prompt(80, seed=2)}
    for row, tokens in prompts.items():
        driver.add(row, tokens, sampling)
    prompts[3] = prompts[2][:64] + prompt(9, seed=3)
    collected: dict[int, list[Any]] = {row: [] for row in prompts}
    # Row 0 decodes while row 1 and later row 2 are still in their prompts; row 3 takes the first blocks of row 2.
    plan = [{0: 5}, {0: 1, 1: 20}, {0: 1, 1: 13, 2: 7}, {0: 1, 1: 1, 2: 73}]
    plan += [{0: 1, 1: 1, 2: 1, 3: 9}, *[{0: 1, 1: 1, 2: 1, 3: 1}] * 11]
    for parts in plan:
        if 3 in parts and 3 not in driver.blocks:
            driver.add(3, prompts[3], sampling, blocks=driver.blocks[2][: 64 // driver.block_size], computed=64)
        for row, sampled in driver.step(parts).items():
            collected[row] += sampled.logprobs
    for row, length in ((row, len(tokens)) for row, tokens in prompts.items()):
        assert collected[row]
        tokens = driver.tokens[row]
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
        for offset, (logprob, rank, top_ids, top_logprobs) in enumerate(collected[row]):
            at = logprobs[length - 1 + offset]
            token = tokens[length + offset]
            assert token == int(at.argmax())
            assert rank == 1
            assert logprob == pytest.approx(float(at[token]), abs=LOGIT_BOUND)
            assert top_ids == at.topk(5).indices.tolist()
            assert top_logprobs == pytest.approx(at.topk(5).values.tolist(), abs=LOGIT_BOUND)
