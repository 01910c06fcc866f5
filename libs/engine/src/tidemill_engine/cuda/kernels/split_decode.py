"""Attention of single tokens over paged KV by a fixed number of programs, each of which reads equally much.

All rows' contexts, laid end to end, are cut into as many equal stretches as there are groups of programs (one program
for each KV head); an item is a stretch's part of one row (`cuda.decode_plan`). One CUDA graph so serves every
distribution of contexts without idle processors at the end. Rows of one item are written at once, others are merged in
the order of their items.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.softmax import fold

_LOG2_E = 1.4426950408889634
_LEAST_ROWS = 16
"""Query rows of a tensor core's tile."""


@dataclass(frozen=True)
class DecodeTiles:
    """Tokens read at once, and how programs are launched."""

    tokens: int = 128
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 2


@triton.jit
def _attend_parts(
    q,
    layer,
    out,
    part_out,
    part_stats,
    group_firsts,
    tiles,
    indices,
    scale,
    block_stride,
    kv_stride,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    Q_HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BT: tl.constexpr,  # noqa: N803
    COMPUTE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS  # noqa: N806
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, ROWS)
    inside = (heads < GROUP)[:, None]
    group = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    q_heads = head * GROUP + heads
    span = tl.arange(0, BT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    # One loop over the tiles of all rows, so that loads run ahead across the end of a row.
    for tile in range(tl.load(group_firsts + group), tl.load(group_firsts + group + 1)):
        row = tl.load(tiles + 4 * tile)
        first_page = tl.load(tiles + 4 * tile + 1)
        count = tl.load(tiles + 4 * tile + 2)
        follows = tl.load(tiles + 4 * tile + 3)
        there = span < count
        page = tl.load(indices + first_page + span // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        at = page * block_stride + (span % BLOCK_SIZE) * (KV_HEADS * DIM) + head * DIM
        k = tl.load(layer + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        v = tl.load(layer + kv_stride + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        q_at = (row * Q_HEADS + q_heads[:, None]) * DIM + dims[None, :]
        q_tile = tl.load(q + q_at, mask=inside, other=0.0).to(COMPUTE)
        scores = tl.dot(q_tile, tl.trans(k.to(COMPUTE))) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        weights, fade, top, total = fold(scores, top, total)
        acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * fade[:, None])
        if follows != -1:
            if follows == -2:
                tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
            else:
                place = follows * Q_HEADS + q_heads
                tl.store(part_out + place[:, None] * DIM + dims[None, :], acc, mask=inside)
                tl.store(part_stats + place * 2, top, mask=heads < GROUP)
                tl.store(part_stats + place * 2 + 1, total, mask=heads < GROUP)
        goes_on = follows == -1
        top = tl.where(goes_on, top, float("-inf"))
        total = tl.where(goes_on, total, 0.0)
        acc = tl.where(goes_on, acc, 0.0)


@triton.jit
def _merge_parts(
    out,
    part_out,
    part_stats,
    item_firsts,
    Q_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    first = tl.load(item_firsts + row)
    last = tl.load(item_firsts + row + 1)
    if last - first > 1:
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, DIM), tl.float32)
        for item in range(first, last):
            place = item * Q_HEADS + heads
            part_top = tl.load(part_stats + place * 2)
            new_top = tl.maximum(top, part_top)
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(part_top - new_top)
            total = total * fade + tl.load(part_stats + place * 2 + 1) * weight
            part = tl.load(part_out + place[:, None] * DIM + dims[None, :])
            acc = acc * fade[:, None] + part * weight[:, None]
            top = new_top
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * Q_HEADS + heads[:, None]) * DIM + dims[None, :], result)


@dataclass(frozen=True)
class DecodeWork:
    """A `DecodePlan` on the device and the page table's indices, all int32; graphs read them in place."""

    group_firsts: torch.Tensor
    tiles: torch.Tensor
    item_firsts: torch.Tensor
    indices: torch.Tensor


def split_decode(
    q: torch.Tensor,
    layer: torch.Tensor,
    out: torch.Tensor,
    work: DecodeWork,
    part_out: torch.Tensor,
    part_stats: torch.Tensor,
    scale: float,
    tiles: DecodeTiles,
) -> None:
    """Writes `out` [rows, heads, dim] like q. Each row has an item at least. `layer` is the pool's [blocks, 2,
    block_size, kv heads, dim] view with any block stride, of bfloat16 or float8_e4m3fn; part_out [items, heads, dim]
    and part_stats [items, heads, 2] are float32 scratch."""
    q_heads, dim = q.shape[1:]
    kv_heads, block_size = layer.shape[3], layer.shape[2]
    is_fp8 = layer.dtype == torch.float8_e4m3fn
    num_groups = work.group_firsts.shape[0] - 1
    _attend_parts[(num_groups * kv_heads,)](
        q,
        layer,
        out,
        part_out,
        part_stats,
        work.group_firsts,
        work.tiles,
        work.indices,
        scale * _LOG2_E,
        layer.stride(0),
        layer.stride(1),
        BLOCK_SIZE=block_size,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(q_heads // kv_heads)),
        BT=tiles.tokens,
        # Each FP8 value is a half precision number.
        COMPUTE=tl.float16 if is_fp8 else tl.bfloat16,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dependent(),
    )
    merge_parts(out, part_out, part_stats, work.item_firsts)


def merge_parts(out: torch.Tensor, part_out: torch.Tensor, part_stats: torch.Tensor, item_firsts: torch.Tensor) -> None:
    """Writes the rows of out [rows, heads, dim] that have several items, from the items' sums."""
    rows, q_heads, dim = out.shape
    heads = q_heads & -q_heads if q_heads % 8 else 8
    _merge_parts[(rows, q_heads // heads)](
        out, part_out, part_stats, item_firsts, Q_HEADS=q_heads, DIM=dim, HEADS=heads, num_warps=4, **dependent()
    )
