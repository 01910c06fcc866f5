"""Matrix products of every weight format and attention over shuffled blocks, against float32 and float64.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_products.py` runs the same on a CPU, slowly.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import os

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tidemill_engine.attention.torch_reference import attend, causal_hidden
from tidemill_engine.cuda.decode_plan import DecodePlan, plan_decode
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.gemv import GemvTiles, fits_gated, gated_gemv, gemv
from tidemill_engine.cuda.kernels.matmul import Tiles, matmul
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.kernels.paged_attention import paged_attention, tile_tokens
from tidemill_engine.cuda.kernels.parts import sum_parts
from tidemill_engine.cuda.kernels.quantise import quantise
from tidemill_engine.cuda.kernels.split_decode import DecodeTiles, DecodeWork, split_decode
from tidemill_engine.cuda.linear import LinearMaker, by_tiles
from tidemill_engine.cuda.weight_formats import fp8_by_block, spread_blocks

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BF16_BOUND = 8e-3
FP8 = torch.float8_e4m3fn
FP8_BOUND = 0.04 if DEVICE == "cuda" else 0.08
"""The interpreter cuts where the device rounds."""


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    reference = reference.to(out.device, torch.float64)
    return float((out.double() - reference).norm() / reference.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


SMALL = Tiles(n=64, m=16, k=128, stages=2)
SPLIT = Tiles(n=128, m=16, k=64, splits=3, stages=2, ahead=1)


def test_few_tokens_and_scaled_weights() -> None:
    x, w = random(2, 384), torch.randint(-127, 128, (64, 384), dtype=torch.int8).to(DEVICE)
    scale = torch.rand(64).to(DEVICE) * 0.01
    exact = x.double() @ (w.double() * scale.double()[:, None]).T
    assert error(gemv(x, w, None, GemvTiles(8192, 4), scale), exact) < BF16_BOUND
    gate, up = exact.chunk(2, dim=-1)
    assert error(gated_gemv(x, w, GemvTiles(8192, 4), scale), torch.nn.functional.silu(gate) * up) < BF16_BOUND
    assert error(gemv(x, w.float().to(FP8), None, GemvTiles(8192, 4), scale), exact) < 0.05


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("outputs", "width"), [(200, 576), (96, 4352)])
def test_few_tokens(tokens: int, outputs: int, width: int) -> None:
    x, w, bias = random(tokens, width), random(outputs, width), random(outputs)
    out = gemv(x, w, bias, GemvTiles(8192, 4))
    assert out.dim() == (3 if width > 4096 else 2)
    whole = out.double().sum(0) if out.dim() == 3 else out
    assert error(whole, x.double() @ w.double().T + bias.double()) < BF16_BOUND
    if fits_gated(width):
        gate, up = (x.double() @ w.double().T).chunk(2, dim=-1)
        assert error(gated_gemv(x, w, GemvTiles(8192, 4)), torch.nn.functional.silu(gate) * up) < BF16_BOUND


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("tokens", "outputs", "width"), [(1, 192, 576), (19, 200, 320)])
def test_bf16_products(tokens: int, outputs: int, width: int, tiles: Tiles) -> None:
    x, w, bias = random(tokens, width), random(outputs, width), random(outputs)
    out = matmul(x, w, bias, tiles=tiles)
    assert out.dim() == (3 if tiles.splits > 1 else 2)
    whole = out.double().sum(0) if out.dim() == 3 else out
    assert error(whole, x.double() @ w.double().T + bias.double()) < BF16_BOUND


def test_int8_products_scale_each_output() -> None:
    x, w = random(5, 384), torch.randint(-127, 128, (130, 384), dtype=torch.int8).to(DEVICE)
    scale = torch.rand(130).to(DEVICE) + 0.1
    out = matmul(x, w, tiles=SMALL, w_scale=scale)
    assert error(out, x.double() @ (w.double() * scale.double()[:, None]).T) < BF16_BOUND


def test_fp8_products_scale_tokens_and_outputs() -> None:
    x, w = random(7, 320), random(200, 320)
    w_scale = w.float().abs().amax(1) / 448
    w8 = (w.float() / w_scale[:, None]).to(FP8)
    x8, x_scale = quantise(x, by_block=False)
    assert error(x8.double() * x_scale.double()[:, None], x) < FP8_BOUND
    out = matmul(x8, w8, tiles=SMALL, w_scale=w_scale, x_scale=x_scale)
    exact = (x8.double() * x_scale.double()[:, None]) @ (w8.double() * w_scale.double()[:, None]).T
    assert error(out, exact) < BF16_BOUND


def test_fp8_products_by_block() -> None:
    x, w = random(3, 320), random(200, 320)
    w_scale = torch.rand(2, 3).to(DEVICE) + 0.5
    spread = w_scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :320]
    w8 = (w.float() / spread).to(FP8)
    x8, x_scale = quantise(x, by_block=True)
    back = x8.double() * x_scale.double().repeat_interleave(128, 1)[:, :320]
    assert error(back, x) < FP8_BOUND
    out = matmul(x8, w8, tiles=SMALL, w_scale=w_scale, x_scale=x_scale)
    assert error(out, back @ (w8.double() * spread.double()).T) < BF16_BOUND


@pytest.mark.parametrize("shape", [(1, 128), (5, 320), (700, 4096)])
def test_blocks_of_values_are_rounded_by_their_largest(shape: tuple[int, int]) -> None:
    x = random(*shape) * torch.rand(shape).to(DEVICE, torch.bfloat16) ** 4
    x8, scale = quantise(x, by_block=True)
    padded = torch.nn.functional.pad(x.double(), (0, -shape[1] % 128)).view(shape[0], -1, 128)
    torch.testing.assert_close(scale.double(), padded.abs().amax(-1).clamp(min=1e-12) / 448, rtol=1e-6, atol=0)
    assert error(x8.double() * scale.double().repeat_interleave(128, 1)[:, : shape[1]], x) < FP8_BOUND


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLAS")
@pytest.mark.parametrize("tokens", [256, 301, 4096])
def test_the_librarys_products_by_block_are_those_of_the_own_kernel(tokens: int) -> None:
    make = LinearMaker(fp8_by_block, batch_invariant=False)
    matrix = make("", random(384, 1024), random(384))
    assert matrix.choices.default.name == "library by block"
    x = random(tokens, 1024)
    scale = spread_blocks(matrix.weight.scale, (384, 1024)).double()
    x8, x_scale = quantise(x, by_block=True)
    exact = x8.double() * x_scale.double().repeat_interleave(128, 1) @ (matrix.weight.values.double() * scale).T
    exact += matrix.bias.double()
    assert error(matrix(x), exact) < BF16_BOUND
    assert error(by_tiles(SMALL).run(matrix, x), exact) < BF16_BOUND


def test_parts_are_summed_by_what_follows() -> None:
    parts = torch.randn(3, 4, 512).to(DEVICE)
    hidden, weight = random(4, 512), torch.rand(512).to(DEVICE) + 0.5
    total = hidden.double() + parts.double().sum(0)
    normed = total * torch.rsqrt((total**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert error(add_rms_norm(hidden, parts, weight, 1e-5), normed) < BF16_BOUND
    assert error(sum_parts(parts), parts.double().sum(0)) < BF16_BOUND
    gate, up = parts.double().sum(0).chunk(2, dim=-1)
    assert error(silu_mul(parts), torch.nn.functional.silu(gate) * up) < BF16_BOUND


class Context:
    """Random KV of some sequences in shuffled blocks of layer 1 of a slab full of NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, block_size: int = 16) -> None:
        counts = [-(-length // block_size) for length in lengths]
        slab = torch.full((sum(counts) + 1, 2, 2, block_size, kv_heads, dim), float("nan")).to(DEVICE, dtype)
        self.layer = slab[:, 1]
        order = torch.randperm(sum(counts)).tolist()
        self.contents, indices = [], []
        for length, count in zip(lengths, counts, strict=True):
            blocks = torch.tensor([order.pop() for _ in range(count)])
            values = torch.randn(length, 2, kv_heads, dim).to(DEVICE, torch.bfloat16).to(dtype)
            for position in range(length):
                self.layer[int(blocks[position // block_size]), :, position % block_size] = values[position]
            indices.append(blocks)
            self.contents.append(values.float().cpu())
        self.indices = torch.cat(indices).int().to(DEVICE)
        self.indptr = ints([0, *counts]).cumsum(0, dtype=torch.int32)
        self.last = ints([(length - 1) % block_size + 1 for length in lengths])


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def split_work(context: Context, lengths: list[int], num_groups: int, tile: int) -> tuple[DecodeWork, int]:
    plan = plan_decode(np.array(lengths), context.indptr.cpu().numpy(), num_groups, tile, 16)
    parts = [torch.from_numpy(getattr(plan, name)).to(DEVICE) for name in DecodePlan.__dataclass_fields__]
    return DecodeWork(*parts, context.indices), int(plan.item_firsts[-1])


SHAPES = [(16, 8, 128), (32, 8, 128), (9, 3, 64)]
KV_TYPES = [torch.bfloat16, FP8]


@pytest.mark.parametrize("dtype", KV_TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_split_decode_merges_its_parts(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths, tiles = [1, 16, 17, 130, 257, 64], DecodeTiles(tokens=32, stages=2)
    context = Context(lengths, kv_heads, dim, dtype)
    work, items = split_work(context, lengths, 5, tiles.tokens)
    q = random(len(lengths), q_heads, dim)
    out = torch.full_like(q, float("nan"))
    part_out = torch.full((items, q_heads, dim), float("nan")).to(DEVICE)
    stats = torch.full((items, q_heads, 2), float("nan")).to(DEVICE)
    split_decode(q, context.layer, out, work, part_out, stats, dim**-0.5, tiles)
    for i, values in enumerate(context.contents):
        reference = attend(
            q[i : i + 1].float().cpu()[None],
            values[None, :, 0],
            values[None, :, 1],
            causal_hidden(lengths[i] - 1, 1, 0, lengths[i]),
        )[0]
        assert error(out[i : i + 1], reference) < BF16_BOUND, lengths[i]


@pytest.mark.parametrize("dtype", KV_TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_paged_attention_of_chunks_and_single_tokens(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths, counts = [1, 90, 17, 70], [1, 1, 17, 40]
    context, size = Context(lengths, kv_heads, dim, dtype), tile_tokens(q_heads, kv_heads)
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, size)]
    q = random(sum(counts), q_heads, dim)
    out = torch.full_like(q, float("nan"))
    indptr = ints([0, *counts]).cumsum(0, dtype=torch.int32)
    rows, firsts = ints([row for row, _ in tiles]), ints([first for _, first in tiles])
    paged_attention(
        q, context.layer, out, rows, firsts, indptr, context.indptr, context.indices, context.last, dim**-0.5
    )
    first = 0
    for length, count, values in zip(lengths, counts, context.contents, strict=True):
        queries, hidden = q[first : first + count].float().cpu(), causal_hidden(length - count, count, 0, length)
        reference = attend(queries[None], values[None, :, 0], values[None, :, 1], hidden)[0]
        assert error(out[first : first + count], reference) < BF16_BOUND, (length, count)
        first += count
