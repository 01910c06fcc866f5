"""Rounds activations to FP8 with a scale for each token, or for each 128 values of a token."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_BLOCK = 128
_AT_ONCE, _FEW_AT_ONCE = 32, 4
"""Blocks of a program, where there are many to fill the device and where there are few."""
_MANY = 16_384
_LARGEST = tl.constexpr(448.0)
"""Of float8_e4m3fn."""


@triton.jit
def _quantise_rows(x, out, scales, size, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / _LARGEST
    tl.store(out + row * size + columns, (values / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantise_blocks(
    x,
    out,
    scales,
    tokens,
    size,
    token_stride,
    block_stride,
    BLOCK: tl.constexpr,  # noqa: N803
    AT_ONCE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    parts = tl.cdiv(size, BLOCK)
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    row = index // parts
    part = index % parts
    columns = part[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens)[:, None] & (columns < size)
    at = row[:, None] * size + columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / _LARGEST
    tl.store(out + at, (values / scale[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * token_stride + part * block_stride, scale, mask=row < tokens)


def quantise(x: torch.Tensor, *, by_block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, size] bfloat16 -> float8_e4m3fn and its scales, float32 [tokens] or [tokens, ceil(size / 128)]."""
    tokens, size = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if by_block:
        scales = torch.empty((tokens, triton.cdiv(size, _BLOCK)), dtype=torch.float32, device=x.device)
        quantise_blocks(x, out, scales)
        return out, scales
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    _quantise_rows[(tokens,)](x, out, scales, size, BLOCK=block, num_warps=warps, **dependent())
    return out, scales


def quantise_blocks(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes out, of x's shape or with more rows, and scales [tokens, ceil(size / 128)] of any strides."""
    tokens, size = x.shape
    parts = triton.cdiv(size, _BLOCK)
    at_once = _AT_ONCE if tokens * parts >= _MANY else _FEW_AT_ONCE
    _quantise_blocks[(triton.cdiv(tokens * parts, at_once),)](
        x, out, scales, tokens, size, *scales.stride(), BLOCK=_BLOCK, AT_ONCE=at_once, num_warps=4, **dependent()
    )
