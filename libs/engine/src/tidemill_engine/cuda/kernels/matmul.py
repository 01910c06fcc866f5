"""x W^T for weights in bfloat16, FP8 (a scale for each output, or for each 128 x 128 block) or INT8.

The weight's rows are the wide side of the tensor cores' tile, so that few tokens waste little. Each output element sums
K in the same order whatever the number of tokens, unless K is split.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

BLOCK = 128
"""Values that share a scale along K, and along N in block-wise weights."""
_GROUP = 8


@dataclass(frozen=True)
class Tiles:
    """Shape of one program's work."""

    n: int = 128
    m: int = 64
    k: int = 128
    splits: int = 1
    """Parts of K, each summed by a program of its own."""
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    """Steps along K whose weights are asked for before the kernel in front has ended."""


@triton.jit
def _prefetch(pointers):
    """Asks for the 128-byte lines at these addresses to come into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _matmul(
    x,
    w,
    out,
    bias,
    x_scale,
    w_scale,
    tokens,
    outputs,
    width,
    per_split,
    BN: tl.constexpr,  # noqa: N803
    BM: tl.constexpr,  # noqa: N803
    BK: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    FORMAT: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    AHEAD: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
    tiles_m = tl.cdiv(tokens, BM)
    tiles_n = tl.cdiv(outputs, BN)
    pid = tl.program_id(0)
    width_of_group = GROUP * tiles_m
    first_n = (pid // width_of_group) * GROUP
    group_n = tl.minimum(tiles_n - first_n, GROUP)
    tile_n = first_n + (pid % width_of_group) % group_n
    tile_m = (pid % width_of_group) // group_n
    split = tl.program_id(1)
    n = tile_n * BN + tl.arange(0, BN)
    m = tile_m * BM + tl.arange(0, BM)
    begin = split * per_split
    end = tl.minimum(begin + per_split, width)
    k = begin + tl.arange(0, BK)
    # Rows past the end read the last row and are not stored.
    w_at = w + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * width + k[None, :]
    x_at = x + tl.minimum(m, tokens - 1).to(tl.int64)[:, None] * width + k[None, :]
    if PDL:
        if AHEAD > 0:
            # Weights depend on no other kernel: they may come while the one before still runs.
            for step in tl.static_range(AHEAD):
                for line in tl.static_range(BK * w.dtype.element_ty.primitive_bitwidth // 1024):
                    ahead = begin + step * BK + line * (1024 // w.dtype.element_ty.primitive_bitwidth)
                    ahead = tl.minimum(ahead, width - 1)
                    _prefetch(w + tl.minimum(n, outputs - 1).to(tl.int64) * width + ahead)
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(begin, end, BK):
        inside = (k + (start - begin) < end)[None, :]
        w_tile = tl.load(w_at, mask=inside, other=0.0)
        x_tile = tl.load(x_at, mask=inside, other=0.0)
        if FORMAT == "int8":
            w_tile = w_tile.to(tl.float32).to(tl.bfloat16)
        if FORMAT == "fp8_block":
            part = tl.dot(w_tile, tl.trans(x_tile))
            blocks = tl.cdiv(width, 128)
            ws = tl.load(w_scale + (tl.minimum(n, outputs - 1) // 128) * blocks + start // 128)
            xs = tl.load(x_scale + tl.minimum(m, tokens - 1) * blocks + start // 128)
            acc += part * ws[:, None] * xs[None, :]
        elif FORMAT == "fp8_channel":
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc)
        w_at += BK
        x_at += BK
    if FORMAT == "fp8_channel":
        acc = acc * tl.load(x_scale + tl.minimum(m, tokens - 1))[None, :]
    if (FORMAT == "fp8_channel") | (FORMAT == "int8"):
        acc = acc * tl.load(w_scale + tl.minimum(n, outputs - 1))[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=(n < outputs) & (split == 0), other=0.0).to(tl.float32)[:, None]
    result = tl.trans(acc)
    at = out + split.to(tl.int64) * tokens * outputs + m.to(tl.int64)[:, None] * outputs + n[None, :]
    mask = (m < tokens)[:, None] & (n < outputs)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles,
    w_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, out] bfloat16 (or `out`'s type), or with tiles.splits > 1 its float32 parts [splits, tokens, out].

    w is [out, in] bfloat16; float8_e4m3fn with w_scale [out] and x of the same type with x_scale [tokens], or with
    w_scale [out / 128, in / 128] and x_scale [tokens, in / 128]; int8 with w_scale [out] and x bfloat16."""
    tokens, width = x.shape
    outputs = w.shape[0]
    if w.dtype == torch.int8:
        form = "int8"
    elif w.dtype == torch.float8_e4m3fn:
        assert w_scale is not None
        form = "fp8_channel" if w_scale.dim() == 1 else "fp8_block"
        assert form == "fp8_channel" or tiles.k == BLOCK, "a step along K lies in one block of scales"
    else:
        form = "bf16"
    steps = triton.cdiv(width, tiles.k)
    per_split = triton.cdiv(steps, tiles.splits) * tiles.k
    splits = triton.cdiv(width, per_split)
    if out is None:
        dtype = torch.bfloat16 if splits == 1 else torch.float32
        shape = (tokens, outputs) if splits == 1 else (splits, tokens, outputs)
        out = torch.empty(shape, dtype=dtype, device=x.device)
    grid = (triton.cdiv(tokens, tiles.m) * triton.cdiv(outputs, tiles.n), splits)
    _matmul[grid](
        x,
        w,
        out,
        out if bias is None else bias,
        out if x_scale is None else x_scale,
        out if w_scale is None else w_scale,
        tokens,
        outputs,
        width,
        per_split,
        BN=tiles.n,
        BM=tiles.m,
        BK=tiles.k,
        GROUP=_GROUP,
        FORMAT=form,
        HAS_BIAS=bias is not None,
        AHEAD=tiles.ahead,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dependent(),
    )
    return out
