"""Products of many matrices at once: every row of x by the matrix of the expert that it was sent to.

Rows are sorted by expert, each expert's rows cut into tiles of BM; one program computes one tile of rows by one tile of
outputs. How many tiles there are is known on the device only, so that the grid has room for the most there can be
(`cuda.dispatch.most_tiles`) and programs past the end return: nothing waits for the device, and a graph serves every
routing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.dispatch import Dispatch
from tidemill_engine.cuda.kernels.launch import dependent


@dataclass(frozen=True)
class GroupedTiles:
    """Shape of one program's work."""

    m: int
    """Rows of x."""
    n: int = 128
    k: int = 128
    warps: int = 4
    stages: int = 3
    together: int = 1
    """Tiles of rows that are computed beside each other for one tile of outputs: those of one expert read its matrix
    from memory once."""
    stays: bool = False
    """By `grouped_fp8`, whose shape this is."""


FP8_TILES = GroupedTiles(128, n=256, k=128, warps=8, stages=4, together=4, stays=True)
"""Of `grouped_fp8`."""


@triton.jit
def _grouped(
    x,
    w,
    out,
    order,
    tiles,
    weights,
    x_scale,
    w_scale,
    outputs,
    width,
    num_tiles,
    TOP_K: tl.constexpr,  # noqa: N803
    BN: tl.constexpr,  # noqa: N803
    BM: tl.constexpr,  # noqa: N803
    BK: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    GATHER: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    in_group = TOGETHER * tl.cdiv(outputs, BN)
    place_in_group = tl.program_id(0) % in_group
    tile = tl.program_id(0) // in_group * TOGETHER + place_in_group % TOGETHER
    expert = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1).to(tl.int64)
    if expert >= 0:
        first = tl.load(tiles + 3 * tile + 1)
        end = tl.load(tiles + 3 * tile + 2)
        m = first + tl.arange(0, BM)
        there = m < end
        place = tl.load(order + m, mask=there, other=0)
        # Rows past the expert's end compute the first place again and are not stored.
        source = place // TOP_K if GATHER else tl.where(there, m, first)
        target = m if GATHER else place
        n = place_in_group // TOGETHER * BN + tl.arange(0, BN)
        held = tl.minimum(n, outputs - 1)
        k = tl.arange(0, BK)
        w_at = w + (expert * outputs + held)[:, None] * width + k[None, :]
        x_at = x + source.to(tl.int64)[:, None] * width + k[None, :]
        blocks = tl.cdiv(width, 128)
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, width, BK):
            inside = (k + start < width)[None, :]
            w_tile = tl.load(w_at, mask=inside, other=0.0)
            x_tile = tl.load(x_at, mask=inside, other=0.0)
            if FP8:
                part = tl.dot(w_tile, tl.trans(x_tile))
                xs = tl.load(x_scale + source.to(tl.int64) * blocks + start // 128)
                first_block = expert * tl.cdiv(outputs, 128)
                if BN <= 128:
                    of_outputs = place_in_group // TOGETHER * BN // 128
                    acc += part * (xs * tl.load(w_scale + (first_block + of_outputs) * blocks + start // 128))[None, :]
                else:
                    ws = tl.load(w_scale + (first_block + held // 128) * blocks + start // 128)
                    acc += part * ws[:, None] * xs[None, :]
            else:
                acc = tl.dot(w_tile, tl.trans(x_tile), acc)
            w_at += BK
            x_at += BK
        if not GATHER:
            acc = acc * tl.load(weights + place, mask=there, other=0.0)[None, :]
        result = tl.trans(acc).to(out.dtype.element_ty)
        at = out + target.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(at, result, mask=there[:, None] & (n < outputs)[None, :])


def grouped_up(
    x: torch.Tensor,
    w: torch.Tensor,
    sent: Dispatch,
    top_k: int,
    tiles: GroupedTiles,
    w_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens, in] times w [experts, out, in] of each of its experts: [rows, out] bfloat16 in the order of `sent`.

    w is bfloat16, or float8_e4m3fn like x with float32 scales w_scale [experts, out / 128, in / 128] and x_scale
    [tokens, in / 128]; `tiles.k` is then 128."""
    out = torch.empty((sent.order.shape[0], w.shape[1]), dtype=torch.bfloat16, device=x.device)
    _launch(x, w, out, sent, None, top_k, tiles, w_scale, x_scale)
    return out


def grouped_down(
    x: torch.Tensor,
    w: torch.Tensor,
    sent: Dispatch,
    weights: torch.Tensor,
    tiles: GroupedTiles,
    w_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, in] in the order of `sent` times w [experts, out, in] and by the choice's weight (float32 [tokens,
    top_k]): [tokens, top_k, out] bfloat16. Scales as in `grouped_up`, those of x by row."""
    tokens, top_k = weights.shape
    out = torch.empty((tokens, top_k, w.shape[1]), dtype=torch.bfloat16, device=x.device)
    _launch(x, w, out, sent, weights, top_k, tiles, w_scale, x_scale)
    return out


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    sent: Dispatch,
    weights: torch.Tensor | None,
    top_k: int,
    tiles: GroupedTiles,
    w_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> None:
    outputs, width = w.shape[1:]
    is_fp8 = w.dtype == torch.float8_e4m3fn
    assert sent.tile_rows == tiles.m, "tiles of rows are those that were dispatched"
    assert not is_fp8 or (tiles.k == 128 and x.dtype == w.dtype), "a step along K lies in one block of scales"
    num_tiles = sent.tiles.shape[0]
    if tiles.stays:
        _launch_fp8(x, w, out, sent, weights, top_k, w_scale, x_scale)
        return
    _grouped[(triton.cdiv(outputs, tiles.n) * triton.cdiv(num_tiles, tiles.together) * tiles.together,)](
        x,
        w,
        out,
        sent.order,
        sent.tiles,
        out if weights is None else weights,
        out if x_scale is None else x_scale,
        out if w_scale is None else w_scale,
        outputs,
        width,
        num_tiles,
        TOP_K=top_k,
        BN=tiles.n,
        BM=tiles.m,
        BK=tiles.k,
        FP8=is_fp8,
        GATHER=weights is None,
        TOGETHER=tiles.together,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dependent(),
    )


def _launch_fp8(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    sent: Dispatch,
    weights: torch.Tensor | None,
    top_k: int,
    w_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> None:
    # Not for Triton's interpreter.
    from tidemill_engine.cuda.kernels.grouped_fp8 import grouped_fp8

    outputs, width = w.shape[1:]
    assert x.numel() < 1 << 31, "offsets in x are 32 bits"
    together, num_tiles = FP8_TILES.together, sent.tiles.shape[0]
    total = triton.cdiv(outputs, FP8_TILES.n) * triton.cdiv(num_tiles, together) * together
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    grouped_fp8[(min(total, processors),)](
        x, w, out, sent.order, sent.tiles, out if weights is None else weights, x_scale, w_scale, num_tiles, outputs,
        width, total, TOP_K=top_k, GATHER=weights is None, TOGETHER=together, ROWS=FP8_TILES.m, OUTPUTS=FP8_TILES.n,
        STAGES=FP8_TILES.stages, num_warps=FP8_TILES.warps, **dependent(),
    )  # fmt: skip
