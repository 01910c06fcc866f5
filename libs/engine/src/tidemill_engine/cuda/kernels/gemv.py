"""x W^T for one to four tokens in bfloat16, and weights of any type with at most a scale for each output.

Weights go straight to registers. A program's whole tile of them is on its way before it waits for the kernel in front,
so that the memory is busy between kernels too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

MOST_TOKENS = 4
_LONGEST = 4096


@dataclass(frozen=True)
class GemvTiles:
    """Values of the weight that a program holds, and its threads."""

    values: int = 16384
    warps: int = 8


@triton.jit
def _gemv(
    x,
    w,
    out,
    bias,
    scale,
    outputs,
    width,
    TOKENS: tl.constexpr,  # noqa: N803
    BN: tl.constexpr,  # noqa: N803
    BK: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = split * BK + tl.arange(0, BK)
    inside = k < width
    there = (n < outputs)[:, None] & inside[None, :]
    at = w + n.to(tl.int64)[:, None] * width + k[None, :]
    tile = tl.load(at, mask=there, other=0.0)
    up_tile = tile
    if GATED:
        up_tile = tl.load(at + outputs.to(tl.int64) * width, mask=there, other=0.0)
    if PDL:
        gdc_wait()
    for token in tl.static_range(TOKENS):
        values = tl.load(x + token * width + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = tl.sum(tile.to(tl.float32) * values, axis=1)
        if HAS_SCALE:
            total *= tl.load(scale + n, mask=n < outputs, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + n, mask=(n < outputs) & (split == 0), other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up_tile.to(tl.float32) * values, axis=1)
            if HAS_SCALE:
                up *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)
            total = total * tl.sigmoid(total) * up
        place = out + (split * TOKENS + token) * outputs + n
        tl.store(place, total.to(out.dtype.element_ty), mask=n < outputs)


def block_along_k(width: int) -> int:
    """Largest block that leaves at most a sixteenth of its steps idle; the longest where the width needs only one."""
    if width <= _LONGEST:
        return int(triton.next_power_of_2(width))
    sizes = [_LONGEST >> shift for shift in range(4)]
    return next((size for size in sizes if triton.cdiv(width, size) * size <= width * 17 // 16), sizes[-1])


def gemv(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tiles: GemvTiles, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, in] bfloat16, w [out, in] with a float32 scale [out] unless it is bfloat16 -> [tokens, out] bfloat16,
    or its float32 parts [parts, tokens, out] where one program does not hold a whole row."""
    (tokens, width), outputs = x.shape, w.shape[0]
    block = block_along_k(width)
    parts = triton.cdiv(width, block)
    shape, dtype = ((tokens, outputs), torch.bfloat16) if parts == 1 else ((parts, tokens, outputs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _launch(x, w, out, bias, scale, outputs, block, parts, tiles, gated=False)
    return out


def gated_gemv(x: torch.Tensor, w: torch.Tensor, tiles: GemvTiles, scale: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x G^T) * (x U^T) for w = [G; U] of [2 * inner, in], `in` at most 4,096: [tokens, inner] bfloat16."""
    inner = w.shape[0] // 2
    assert fits_gated(x.shape[1])
    out = torch.empty((x.shape[0], inner), dtype=torch.bfloat16, device=x.device)
    _launch(x, w, out, None, scale, inner, block_along_k(x.shape[1]), 1, tiles, gated=True)
    return out


def fits_gated(width: int) -> bool:
    """One program holds whole rows."""
    return width <= _LONGEST


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    outputs: int,
    block: int,
    parts: int,
    tiles: GemvTiles,
    *,
    gated: bool,
) -> None:
    rows = max(1, tiles.values // block // (2 if gated else 1))
    _gemv[(triton.cdiv(outputs, rows), parts)](
        x,
        w,
        out,
        out if bias is None else bias,
        out if scale is None else scale,
        outputs,
        x.shape[1],
        TOKENS=x.shape[0],
        BN=rows,
        BK=block,
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        num_warps=tiles.warps,
        **dependent(),
    )
