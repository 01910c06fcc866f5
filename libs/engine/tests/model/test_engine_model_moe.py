"""Softmax-routed experts behind grouped-query attention equal Hugging Face transformers in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.oracle_checkpoints import check_mixed_batch, random_prompt
from transformers import AutoModelForCausalLM

from tidemill_engine.layers.linear import FullPrecision
from tidemill_engine.layers.moe import Experts, clamped_silu_mul

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("mixtral", {}),
]
LOGIT_BOUND = 2e-4


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{len(variant[1])}")
def checkpoint(request: pytest.FixtureRequest, oracle: Callable[..., Path]) -> Path:
    name, overrides = request.param
    return oracle(name, **overrides)


@torch.inference_mode()
@pytest.mark.parametrize("weights", ["fp32", "auto"])
def test_logits_equal_the_reference_whole_chunked_and_step_by_step(
    checkpoint: Path, weights: str, start_runner: Callable[..., Any]
) -> None:
    tokens = random_prompt(90)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = model(torch.tensor([tokens])).logits[0]
    driver = start_runner(checkpoint, weights=weights)
    for chunk in (1000, 17, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


@torch.inference_mode()
def test_greedy_tokens_equal_the_reference_in_a_mixed_batch(checkpoint: Path, start_runner: Callable[..., Any]) -> None:
    check_mixed_batch(
        start_runner(checkpoint),
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(),
        LOGIT_BOUND,
    )


@torch.inference_mode()
def test_a_tokens_experts_do_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    up = [FullPrecision(torch.randn(12, 8, generator=generator)) for _ in range(5)]
    down = [FullPrecision(torch.randn(8, 6, generator=generator)) for _ in range(5)]
    experts = Experts(up, down, clamped_silu_mul(10.0))
    x = torch.randn(7, 8, generator=generator)
    chosen = torch.rand(7, 5, generator=generator).topk(3, dim=-1).indices
    weights = torch.rand(7, 3, generator=generator)
    together = experts(x, weights, chosen)
    for token in range(7):
        alone = experts(x[token : token + 1], weights[token : token + 1], chosen[token : token + 1])
        assert torch.allclose(together[token], alone[0], atol=1e-5)
        plain = sum(
            weight * down[expert](clamped_silu_mul(10.0)(up[expert](x[token])))
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True)
        )
        assert torch.allclose(together[token], plain, atol=1e-5)


def test_the_gate_is_bounded_above_and_its_partner_on_both_sides() -> None:
    made = clamped_silu_mul(2.0)(torch.tensor([[50.0, -50.0, 1.0, 50.0, 1.0, -50.0]]))
    silu = torch.nn.functional.silu
    expected = torch.stack([silu(torch.tensor(2.0)) * 2, silu(torch.tensor(-50.0)), silu(torch.tensor(1.0)) * -2])
    assert torch.allclose(made[0], expected)
