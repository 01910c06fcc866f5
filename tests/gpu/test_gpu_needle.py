"""One token that matters among very many that do not: sums over a long context are kept in float32, also over FP8 KV.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_needle.py` runs the same over a short context on a CPU.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import math

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from gpu.test_gpu_products import BF16_BOUND, DEVICE, KV_TYPES, SHAPES, Context, error, ints, split_work

from tidemill_engine.cuda.kernels.paged_attention import paged_attention
from tidemill_engine.cuda.kernels.split_decode import DecodeTiles, split_decode

LENGTH = 65_521 if DEVICE == "cuda" else 385
PLACES = (0, LENGTH // 2 + 7, LENGTH - 2)
BLOCK = 16


class Haystack(Context):
    """One context in shuffled blocks that three rows share; each row's queries look for a token of their own."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        blocks = -(-LENGTH // BLOCK)
        wanted = torch.randn(len(PLACES), kv_heads, dim).to(DEVICE)
        wanted *= dim**0.5 / wanted.norm(dim=-1, keepdim=True)
        values = torch.randn(blocks * BLOCK, 2, kv_heads, dim).to(DEVICE)
        # About half of the weight of a softmax over scores of variance 1.
        values[list(PLACES), 0] = wanted * (math.log(LENGTH) + 0.5) / dim**0.5
        values[LENGTH:] = float("nan")
        self.values = values.bfloat16().to(dtype)
        order = torch.randperm(blocks).to(DEVICE)
        slab = torch.full((blocks, 2, 2, BLOCK, kv_heads, dim), float("nan")).to(DEVICE, dtype)
        self.layer = slab[:, 1]
        by_block = self.values.view(blocks, BLOCK, 2, kv_heads, dim).transpose(1, 2)
        self.layer.view(torch.uint8)[order] = by_block.contiguous().view(torch.uint8)
        self.indices = order.int().repeat(len(PLACES))
        self.indptr = ints([i * blocks for i in range(len(PLACES) + 1)])
        self.last = ints([(LENGTH - 1) % BLOCK + 1] * len(PLACES))
        strengths = torch.linspace(0.9, 1.1, q_heads // kv_heads).to(DEVICE)
        self.q = (wanted[:, :, None] * strengths[:, None]).flatten(1, 2).bfloat16()

    def check(self, out: torch.Tensor) -> None:
        group = self.q.shape[1] // self.values.shape[2]
        k, v = (part.double().repeat_interleave(group, 1) for part in self.values[:LENGTH].float().unbind(1))
        for row, place in enumerate(PLACES):
            scores = torch.einsum("hd,lhd->hl", self.q[row].double(), k) * self.q.shape[-1] ** -0.5
            reference = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
            assert error(out[row], reference) < BF16_BOUND, place
            assert float(torch.cosine_similarity(out[row].double(), v[place], dim=-1).min()) > 0.8, place


@pytest.mark.parametrize("dtype", KV_TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_single_tokens_find_it(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    context, lengths = Haystack(q_heads, kv_heads, dim, dtype), [LENGTH] * len(PLACES)
    tiles = DecodeTiles() if DEVICE == "cuda" else DecodeTiles(tokens=32, stages=2)
    work, items = split_work(context, lengths, 33 if DEVICE == "cuda" else 5, tiles.tokens)
    out = torch.full_like(context.q, float("nan"))
    part_out = torch.full((items, q_heads, dim), float("nan")).to(DEVICE)
    stats = torch.full((items, q_heads, 2), float("nan")).to(DEVICE)
    split_decode(context.q, context.layer, out, work, part_out, stats, dim**-0.5, tiles)
    context.check(out)


@pytest.mark.parametrize("dtype", KV_TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_the_kernel_of_one_shape_finds_it(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    context = Haystack(q_heads, kv_heads, dim, dtype)
    out, rows = torch.full_like(context.q, float("nan")), ints(list(range(len(PLACES))))
    paged_attention(
        context.q, context.layer, out, rows, torch.zeros_like(rows), ints(list(range(len(PLACES) + 1))),
        context.indptr, context.indices, context.last, dim**-0.5,
    )  # fmt: skip
    context.check(out)
