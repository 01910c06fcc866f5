"""Grouped products and routed experts against plain sums in float64.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_experts.py` runs the same on a CPU, slowly.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import os

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tidemill_engine.cuda.dispatch import dispatch
from tidemill_engine.cuda.kernels.grouped import FP8_TILES, GroupedTiles, grouped_down, grouped_up
from tidemill_engine.cuda.kernels.quantise import quantise
from tidemill_engine.cuda.weight_formats import fp8_by_block, spread_blocks

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BF16_BOUND = 8e-3


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    reference = reference.to(out.device, torch.float64)
    return float((out.double() - reference).norm() / reference.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def routed(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Choices that leave some experts out and crowd others."""
    likely = torch.rand(num_experts) ** 4 * (torch.arange(num_experts) % 5 != 3)
    return torch.multinomial(likely.expand(tokens, -1) + 1e-9, top_k).to(DEVICE)


@pytest.mark.parametrize(
    "tiles", [GroupedTiles(16, n=64, k=64, stages=2, together=4), GroupedTiles(64, n=128, k=128, stages=2)]
)
@pytest.mark.parametrize("tokens", [1, 70])
def test_grouped_products_are_those_of_each_expert(tokens: int, tiles: GroupedTiles) -> None:
    num_experts, top_k, width, outputs = 11, 3, 192, 200
    experts = routed(tokens, num_experts, top_k)
    x, up, down = random(tokens, width), random(num_experts, outputs, width), random(num_experts, width, outputs)
    weights = torch.rand(tokens, top_k).to(DEVICE)
    sent = dispatch(experts, num_experts, tiles.m)
    inner = grouped_up(x, up, sent, top_k, tiles)
    exact = torch.einsum("ti,tkoi->tko", x.double(), up.double()[experts])
    assert error(inner, exact.flatten(0, 1)[sent.order.long()]) < BF16_BOUND
    out = grouped_down(inner, down, sent, weights, tiles)
    by_choice = torch.empty_like(inner)
    by_choice[sent.order.long()] = inner
    exact = torch.einsum("tko,tkio->tki", by_choice.view(tokens, top_k, -1).double(), down.double()[experts])
    assert error(out, exact * weights.double()[..., None]) < BF16_BOUND


BY_BLOCK = [GroupedTiles(rows, n=128, k=128, stages=2) for rows in (16, 64)]
if DEVICE == "cuda":
    BY_BLOCK.append(FP8_TILES)


@pytest.mark.parametrize("tiles", BY_BLOCK, ids=str)
@pytest.mark.parametrize(("tokens", "width", "outputs"), [(20, 320, 200)] + [(400, 512, 384)] * (DEVICE == "cuda"))
def test_grouped_products_by_block(tokens: int, width: int, outputs: int, tiles: GroupedTiles) -> None:
    num_experts, top_k = 5, 2
    experts = routed(tokens, num_experts, top_k)
    x = random(tokens, width)
    matrices = [fp8_by_block(random(outputs, width)) for _ in range(num_experts)]
    values = torch.stack([matrix.values.view(torch.uint8) for matrix in matrices]).view(torch.float8_e4m3fn)
    scale = torch.stack([matrix.scale for matrix in matrices if matrix.scale is not None])
    exact_w = torch.stack(
        [m.values.double() * spread_blocks(m.scale, m.values.shape).double() for m in matrices if m.scale is not None]
    )
    x8, x_scale = quantise(x, by_block=True)
    back = x8.double() * x_scale.double().repeat_interleave(128, 1)[:, :width]
    sent = dispatch(experts, num_experts, tiles.m)
    out = grouped_up(x8, values, sent, top_k, tiles, scale, x_scale)
    exact = torch.einsum("ti,tkoi->tko", back, exact_w[experts])
    assert error(out, exact.flatten(0, 1)[sent.order.long()]) < BF16_BOUND
    weights = torch.rand(tokens, top_k).to(DEVICE)
    rows8, row_scale = back.repeat_interleave(top_k, 0)[sent.order.long()], None
    rows8, row_scale = quantise(rows8.bfloat16(), by_block=True)
    out = grouped_down(rows8, values, sent, weights, tiles, scale, row_scale)
    rows_back = rows8.double() * row_scale.double().repeat_interleave(128, 1)[:, :width]
    by_choice = torch.empty_like(rows_back)
    by_choice[sent.order.long()] = rows_back
    exact = torch.einsum("tki,tkoi->tko", by_choice.view(tokens, top_k, -1), exact_w[experts])
    assert error(out, exact * weights.double()[..., None]) < BF16_BOUND
