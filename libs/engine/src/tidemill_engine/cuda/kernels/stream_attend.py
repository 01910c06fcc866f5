"""Attention over the last tokens' rows and over rows of a compressed stream, which are keys and values at once, with a
sink for each head.

One program serves one token and some heads, which share what it reads: the window first, whose rows are the step's own
or lie in the sequence's ring, then the stream's rows, all that the token can see or those that an indexer chose. Where
tokens are few, several programs share a token's tiles and `_merge` adds up what they found. Values were keys, and keys
were turned: what comes out is turned back.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.softmax import fold
from tidemill_engine.cuda.kernels.stream_store import Angles, StepTokens

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_HEADS = 16
"""Query rows of a tensor core's tile."""
_MOST_HEADS = 64
_MOST_SPLITS = 16
_NO_STREAM, _ALL, _CHOSEN = 0, 1, 2


@dataclass(frozen=True)
class StreamTiles:
    """Rows read at once, and how programs are launched."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class StreamRows:
    """Rows of a stream that a step's tokens attend to."""

    layer: torch.Tensor
    """The pool's [blocks, rows, dim] view."""
    visible: torch.Tensor
    """[tokens] int32: complete rows at each token."""
    slots: torch.Tensor | None
    """[tokens, most] int32 places in the pool, of which the first min(visible, most) are chosen; None: all rows."""


@triton.jit
def _turned_back(x, cos, sin, token, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr):  # noqa: N803
    """[ROWS, DIM] by the opposite angles of a token."""
    even, odd = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
    pair = tl.arange(0, DIM // 2) - (DIM // 2 - HALF)
    c = tl.load(cos + token * HALF + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair >= 0, other=0.0)[None, :]
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (ROWS, DIM))


@triton.jit
def _attend(
    q,
    own,
    rings,
    stream,
    chosen,
    visible,
    positions,
    token_rows,
    starts,
    firsts,
    row_slots,
    indptr,
    indices,
    sinks,
    cos,
    sin,
    out,
    part_out,
    part_stats,
    scale,
    most,
    ring_stride,
    block_stride,
    WINDOW: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    BT: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (heads < NUM_HEADS)[:, None]
    dims = tl.arange(0, DIM)
    span = tl.arange(0, BT)
    row = tl.load(token_rows + token)
    position = tl.load(positions + token)
    start = tl.load(starts + row)
    own_first = own + (tl.load(firsts + row) - start).to(tl.int64) * DIM
    ring = rings + tl.load(row_slots + row).to(tl.int64) * ring_stride
    low = tl.maximum(position - WINDOW + 1, 0)
    near = tl.cdiv(position - low + 1, BT)
    num_far = 0
    if KIND > 0:
        num_far = tl.load(visible + token)
    if KIND == 2:
        num_far = tl.minimum(num_far, most)
    total_tiles = near + tl.cdiv(num_far, BT)
    split = tl.program_id(2)
    first_tile = total_tiles * split // SPLITS
    end_tile = total_tiles * (split + 1) // SPLITS
    q_tile = tl.load(q + (token * NUM_HEADS + heads)[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, DIM), tl.float32)
    for tile in range(first_tile, tl.minimum(end_tile, near)):
        at = low + tile * BT + span
        there = at <= position
        is_own = (there & (at >= start))[:, None]
        is_kept = (there & (at < start))[:, None]
        new = tl.load(own_first + at.to(tl.int64)[:, None] * DIM + dims[None, :], mask=is_own, other=0.0)
        kept = tl.load(ring + (at % WINDOW)[:, None] * DIM + dims[None, :], mask=is_kept, other=0.0)
        keys = tl.where(is_own, new, kept)
        scores = tl.where(there[None, :], tl.dot(q_tile, tl.trans(keys)) * scale, float("-inf"))
        weights, fade, top, total = fold(scores, top, total)
        acc = tl.dot(weights.to(keys.dtype), keys, acc * fade[:, None])
    if KIND > 0:
        first_page = tl.load(indptr + row)
        for tile in range(tl.maximum(first_tile, near), end_tile):
            number = (tile - near) * BT + span
            there = number < num_far
            if KIND == 2:
                place = tl.load(chosen + token * most + number, mask=there, other=0)
                page = place // BLOCK_ROWS
                offset = place % BLOCK_ROWS
            else:
                page = tl.load(indices + first_page + number // BLOCK_ROWS, mask=there, other=0)
                offset = number % BLOCK_ROWS
            at = stream + page.to(tl.int64) * block_stride + offset * DIM
            keys = tl.load(at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
            scores = tl.where(there[None, :], tl.dot(q_tile, tl.trans(keys)) * scale, float("-inf"))
            weights, fade, top, total = fold(scores, top, total)
            # Loaded anew, from L2: a tile that serves two products as it lies and turned is not loaded ahead of time.
            values = tl.load(at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
            acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None])
    if SPLITS == 1:
        sink = tl.load(sinks + heads, mask=heads < NUM_HEADS, other=0.0) * _LOG2_E
        most_of_all = tl.maximum(top, sink)
        fade = tl.exp2(top - most_of_all)
        shares = fade / (total * fade + tl.exp2(sink - most_of_all))
        result = _turned_back(acc * shares[:, None], cos, sin, token, HEADS, DIM, HALF)
        target = out + (token * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    else:
        at_part = (token * SPLITS + split) * NUM_HEADS + heads
        tl.store(part_out + at_part[:, None] * DIM + dims[None, :], acc, mask=inside)
        tl.store(part_stats + at_part * 2, top, mask=heads < NUM_HEADS)
        tl.store(part_stats + at_part * 2 + 1, total, mask=heads < NUM_HEADS)


@triton.jit
def _merge(
    part_out,
    part_stats,
    sinks,
    cos,
    sin,
    out,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    at = (token * SPLITS + tl.arange(0, SPLITS)) * NUM_HEADS + head
    tops = tl.load(part_stats + at * 2)
    sink = tl.load(sinks + head) * _LOG2_E
    top = tl.maximum(tl.max(tops, axis=0), sink)
    weights = tl.exp2(tops - top)
    total = tl.sum(tl.load(part_stats + at * 2 + 1) * weights, axis=0) + tl.exp2(sink - top)
    parts = tl.load(part_out + at[:, None] * DIM + dims[None, :])
    merged = tl.sum(parts * weights[:, None], axis=0) / total
    result = _turned_back(tl.reshape(merged, (1, DIM)), cos, sin, token, 1, DIM, HALF)
    tl.store(out + (token * NUM_HEADS + head) * DIM + dims, tl.reshape(result, (DIM,)).to(out.dtype.element_ty))


def stream_tiles(dim: int) -> StreamTiles:
    """What was fastest of a few on an H200."""
    return StreamTiles(rows=32, warps=8, stages=2) if dim > 256 else StreamTiles(rows=32, warps=4, stages=2)


def splits_for(num_tokens: int, num_heads: int, processors: int) -> int:
    """Programs of a token: a power of two, so many that all processors have work."""
    room = max(1, processors // (num_tokens * -(-num_heads // _MOST_HEADS)))
    return min(_MOST_SPLITS, int(1 << room.bit_length() - 1))


def attend_streams(
    q: torch.Tensor,
    own: torch.Tensor,
    rings: torch.Tensor,
    window: int,
    stream: StreamRows | None,
    sinks: torch.Tensor,
    angles: Angles,
    tokens: StepTokens,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    splits: int,
    tiles: StreamTiles,
) -> torch.Tensor:
    """[tokens, heads, dim] bfloat16 like q. own [tokens, dim] are the step's rows, rings [slots, window * dim] those
    before it, all bfloat16 and turned; sinks [heads] float32; indptr and indices int32 are the rows' blocks."""
    count, num_heads, dim = q.shape
    out = torch.empty_like(q)
    parts, stats = out, out
    if splits > 1:
        parts = torch.empty((count, splits, num_heads, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((count, splits, num_heads, 2), dtype=torch.float32, device=q.device)
    kind, layer, visible, slots, most = _NO_STREAM, own[None], tokens.positions, tokens.positions, 0
    if stream is not None:
        kind, layer, visible = _ALL, stream.layer, stream.visible
        if stream.slots is not None:
            kind, slots, most = _CHOSEN, stream.slots, stream.slots.shape[1]
    heads = min(_MOST_HEADS, max(_LEAST_HEADS, triton.next_power_of_2(num_heads)))
    _attend[(count, triton.cdiv(num_heads, heads), splits)](
        q,
        own,
        rings,
        layer,
        slots,
        visible,
        tokens.positions,
        tokens.rows,
        tokens.starts,
        tokens.firsts,
        tokens.slots,
        indptr,
        indices,
        sinks,
        *angles,
        out,
        parts,
        stats,
        float(dim**-0.5) * _LOG2_E.value,
        most,
        rings.stride(0),
        layer.stride(0),
        WINDOW=window,
        BLOCK_ROWS=layer.shape[1],
        NUM_HEADS=num_heads,
        HEADS=heads,
        DIM=dim,
        HALF=angles[0].shape[1],
        BT=tiles.rows,
        KIND=kind,
        SPLITS=splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dependent(),
    )
    if splits > 1:
        _merge[(count, num_heads)](
            parts, stats, sinks, *angles, out, NUM_HEADS=num_heads, DIM=dim, HALF=angles[0].shape[1], SPLITS=splits,
            num_warps=2, **dependent(),
        )  # fmt: skip
    return out
