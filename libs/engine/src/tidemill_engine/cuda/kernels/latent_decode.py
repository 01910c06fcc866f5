"""Attention in latent space: queries over rows (latent, turned key) that are keys and, without the turned part, values.

Rows come through block tables, or are named one by one where an indexer has chosen them. One program computes one item
(`cuda.item_plan`) for some heads, which share what it reads. Queries of one item are written at once, others are merged
in the order of their items.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import INTERPRETED, dependent
from tidemill_engine.cuda.kernels.softmax import fold

_LOG2_E = 1.4426950408889634
_LEAST_HEADS = 16
"""Query rows of a tensor core's tile."""
_MOST_HEADS = 64
_MANY_ROWS = 16
"""From so many on, their items are merged by few programs for each row."""
_MOST_RANK = 512
"""Of sums that two warp groups hold in registers."""


@dataclass(frozen=True)
class LatentTiles:
    """Tokens read at once, and how programs are launched."""

    tokens: int
    warps: int
    stages: int
    programs_per_sm: int
    reads_once: bool = False
    """By `latent_decode_once`."""


def latent_tiles(num_heads: int, rank: int) -> LatentTiles:
    """What was fastest of a few for so many heads on an H200."""
    if not INTERPRETED and rank <= _MOST_RANK:
        return LatentTiles(tokens=64, warps=8, stages=2, programs_per_sm=1, reads_once=True)
    if num_heads <= _LEAST_HEADS:
        return LatentTiles(tokens=32, warps=4, stages=3, programs_per_sm=2)
    return LatentTiles(tokens=64, warps=8, stages=3, programs_per_sm=1)


@triton.jit
def _attend_items(
    q_latent,
    q_rope,
    layer,
    out,
    part_out,
    part_stats,
    items,
    item_firsts,
    indices,
    scale,
    num_rows,
    latent_row,
    latent_head,
    rope_row,
    rope_head,
    block_stride,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ROPE: tl.constexpr,  # noqa: N803
    BT: tl.constexpr,  # noqa: N803
    SELECTED: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0)
    if item < tl.load(item_firsts + num_rows):
        row = tl.load(items + 5 * item).to(tl.int64)
        first_index = tl.load(items + 5 * item + 1)
        begin = tl.load(items + 5 * item + 2)
        count = tl.load(items + 5 * item + 3)
        number = tl.load(items + 5 * item + 4).to(tl.int64)
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = (heads < NUM_HEADS)[:, None]
        dims = tl.arange(0, RANK)
        turned = tl.arange(0, ROPE)
        span = tl.arange(0, BT)
        by_latent = q_latent + row * latent_row + heads.to(tl.int64)[:, None] * latent_head + dims[None, :]
        by_rope = q_rope + row * rope_row + heads[:, None] * rope_head + turned[None, :]
        q_latent_tile = tl.load(by_latent, mask=inside, other=0.0)
        q_rope_tile = tl.load(by_rope, mask=inside, other=0.0)
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, RANK), tl.float32)
        for start in range(0, count, BT):
            there = start + span < count
            token = begin + start + span
            if SELECTED:
                slot = tl.load(indices + first_index + token, mask=there, other=0)
                page = slot // BLOCK_SIZE
                offset = slot % BLOCK_SIZE
            else:
                page = tl.load(indices + first_index + token // BLOCK_SIZE, mask=there, other=0)
                offset = token % BLOCK_SIZE
            at = layer + page.to(tl.int64) * block_stride + offset * (RANK + ROPE)
            latent = tl.load(at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
            keys = tl.load(at[:, None] + RANK + turned[None, :], mask=there[:, None], other=0.0)
            scores = tl.dot(q_latent_tile, tl.trans(latent))
            scores = tl.dot(q_rope_tile, tl.trans(keys), scores) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            weights, fade, top, total = fold(scores, top, total)
            # Loaded anew, from L2: a tile that serves two products as it lies and turned is not loaded ahead of time.
            values = tl.load(at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
            acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None])
        if number < 0:
            target = (row * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
            tl.store(out + target, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            place = number * NUM_HEADS + heads
            tl.store(part_out + place[:, None] * RANK + dims[None, :], acc, mask=inside)
            tl.store(part_stats + place * 2, top, mask=heads < NUM_HEADS)
            tl.store(part_stats + place * 2 + 1, total, mask=heads < NUM_HEADS)


@triton.jit
def _merge(
    out,
    part_out,
    part_stats,
    item_firsts,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    first = tl.load(item_firsts + row)
    last = tl.load(item_firsts + row + 1)
    if last - first > 1:
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, DIMS), tl.float32)
        for start in range(first, last, ITEMS):
            items = start + tl.arange(0, ITEMS)
            there = (items < last)[:, None] & (heads < NUM_HEADS)[None, :]
            place = items.to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
            tops = tl.load(part_stats + place * 2, mask=there, other=float("-inf"))
            totals = tl.load(part_stats + place * 2 + 1, mask=there, other=0.0)
            parts = tl.load(
                part_out + place[:, :, None] * RANK + dims[None, None, :], mask=there[:, :, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(tops, axis=0))
            # Heads that are not there have no top.
            shift = tl.where(heads < NUM_HEADS, new_top, 0.0)
            weights = tl.exp2(tops - shift[None, :])
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(totals * weights, axis=0)
            acc = acc * fade[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
            top = new_top
        at = (row * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(heads < NUM_HEADS)[:, None])


def _merge_items(
    out: torch.Tensor, part_out: torch.Tensor, part_stats: torch.Tensor, item_firsts: torch.Tensor
) -> None:
    """Writes the rows of out [rows, heads, rank] that have several items: few of them where there are many rows."""
    rows, num_heads, rank = out.shape
    items, heads, dims = (4, 2, rank) if rows >= _MANY_ROWS else (16, 1, min(128, rank))
    _merge[(rows, triton.cdiv(num_heads, heads), rank // dims)](
        out, part_out, part_stats, item_firsts, NUM_HEADS=num_heads, RANK=rank, ITEMS=items, HEADS=heads, DIMS=dims,
        num_warps=4, **dependent(),
    )  # fmt: skip


def attend_latent(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    layer: torch.Tensor,
    items: torch.Tensor,
    item_firsts: torch.Tensor,
    program_firsts: torch.Tensor,
    indices: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    tiles: LatentTiles,
    *,
    selected: bool,
) -> torch.Tensor:
    """[rows, heads, rank] bfloat16 for q_latent [rows, heads, rank] and q_rope [rows, heads, rope] of any row and head
    strides. `layer` is the pool's [blocks, block_size, rank + rope] view; items [most items, 5], item_firsts [rows + 1]
    and program_firsts [programs + 1], filled up with its last value, are an `ItemPlan`; indices hold the rows' blocks
    or, where `selected`, their tokens as block * block_size + offset; all int32. `parts` is float32 scratch [items,
    heads, rank] and [items, heads, 2]; None where each row has one item."""
    rows, num_heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    assert layer.stride()[1:] == (rank + rope, 1), "a block of one layer is contiguous"
    assert q_latent.stride(2) == 1 == q_rope.stride(2), "a head's values lie side by side"
    out = torch.empty((rows, num_heads, rank), dtype=torch.bfloat16, device=q_latent.device)
    part_out, part_stats = parts or (out, out)
    queries = (q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1))
    shape: dict[str, Any] = {"BLOCK_SIZE": layer.shape[1], "NUM_HEADS": num_heads, "RANK": rank, "ROPE": rope}
    shape |= {"BT": tiles.tokens, "SELECTED": selected, "num_warps": tiles.warps} | dependent()
    scale *= _LOG2_E
    if tiles.reads_once:
        # Not for Triton's interpreter.
        from tidemill_engine.cuda.kernels.latent_decode_once import HEADS, attend_once

        attend_once[(program_firsts.shape[0] - 1, triton.cdiv(num_heads, HEADS))](
            q_latent, q_rope, layer, out, part_out, part_stats, items, program_firsts, indices, scale, *queries,
            layer.stride(0), HEADS=HEADS, STAGES=tiles.stages, **shape,
        )  # fmt: skip
    else:
        heads = min(_MOST_HEADS, max(_LEAST_HEADS, triton.next_power_of_2(num_heads)))
        _attend_items[(items.shape[0], triton.cdiv(num_heads, heads))](
            q_latent, q_rope, layer, out, part_out, part_stats, items, item_firsts, indices, scale, rows, *queries,
            layer.stride(0), HEADS=heads, num_stages=tiles.stages, **shape,
        )  # fmt: skip
    if parts is not None:
        _merge_items(out, part_out, part_stats, item_firsts)
    return out
