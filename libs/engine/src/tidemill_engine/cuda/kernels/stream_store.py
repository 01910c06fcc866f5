"""What is made of a projection before attention, and what is kept of it: norms, rotary embedding, rows of compressed
streams, the window and the compressors' state.

Angles are those of a step's tokens, [tokens, turning / 2] float32 each; the last values of a head turn, in pairs that
lie beside each other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_HEADS = 8
"""Of a program."""
_SPAN = 16
"""Tokens of a run that are read at a time."""

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepTokens:
    """Where each token of a step belongs; int32 on the device."""

    positions: torch.Tensor
    """[tokens]"""
    block_ids: torch.Tensor
    """[tokens]: the block that takes it."""
    rows: torch.Tensor
    """[tokens]: its row."""
    starts: torch.Tensor
    """[rows]: the position of the row's first token in this step."""
    firsts: torch.Tensor
    """[rows]: that token."""
    lengths: torch.Tensor
    """[rows]: the context behind the step."""
    slots: torch.Tensor
    """[rows]: sequence slot; -1 for rows that fill a graph up."""


@triton.jit
def _norm_turn(
    x,
    out,
    norm,
    cos,
    sin,
    eps,
    x_row,
    num_heads,
    width,
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    there = (heads < num_heads)[:, None] & (dims < width)[None, :]
    source = x + token * x_row + heads[:, None] * width
    own = tl.load(source + dims[None, :], mask=there, other=0.0).to(tl.float32)
    scale = tl.full((HEADS,), 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / width + eps)
    own = own * scale[:, None]
    if WEIGHTED:
        own = own * tl.load(norm + dims, mask=dims < width, other=0.0)[None, :]
    if HALF > 0:
        # Each value reads the one that turns with it.
        place = dims - (width - 2 * HALF)
        turns = (place >= 0) & (dims < width)
        partner = tl.where(turns, dims ^ 1, dims)
        other = tl.load(source + partner[None, :], mask=there, other=0.0).to(tl.float32) * scale[:, None]
        if WEIGHTED:
            other = other * tl.load(norm + partner, mask=dims < width, other=0.0)[None, :]
        c = tl.load(cos + token * HALF + place // 2, mask=turns, other=1.0)
        s = tl.load(sin + token * HALF + place // 2, mask=turns, other=0.0)
        own = own * c[None, :] + other * tl.where(dims % 2 == 0, -s, s)[None, :]
    target = out + (token * num_heads + heads)[:, None] * width + dims[None, :]
    tl.store(target, own.to(out.dtype.element_ty), mask=there)


def norm_turn(
    x: torch.Tensor,
    num_heads: int,
    *,
    norm: torch.Tensor | None = None,
    unit_norm: bool = False,
    eps: float = 0.0,
    angles: Angles | None = None,
) -> torch.Tensor:
    """x [tokens, heads * width] bfloat16 of any row stride -> [tokens, heads, width]: each head normed (RMS, by `norm`
    [width] float32 or without weights) and turned; width is even."""
    tokens, values = x.shape
    width = values // num_heads
    assert x.stride(1) == 1, "a token's values lie side by side"
    out = torch.empty((tokens, num_heads, width), dtype=torch.bfloat16, device=x.device)
    cos, sin = angles or (x, x)
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    block = triton.next_power_of_2(width)
    _norm_turn[(tokens, triton.cdiv(num_heads, heads))](
        x,
        out,
        x if norm is None else norm,
        cos,
        sin,
        eps,
        x.stride(0),
        num_heads,
        width,
        HEADS=heads,
        BLOCK=block,
        HALF=cos.shape[1] if angles else 0,
        NORM=unit_norm or norm is not None,
        WEIGHTED=norm is not None,
        num_warps=min(8, max(1, heads * block // 512)),
        **dependent(),
    )
    return out


@triton.jit
def _compress(
    made,
    state,
    layer,
    norm,
    bias,
    cos,
    sin,
    positions,
    block_ids,
    token_rows,
    starts,
    firsts,
    row_slots,
    eps,
    made_row,
    slot_stride,
    block_stride,
    rows_per_block,
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    RATIO: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    SIZE: tl.constexpr = 2 * RATIO if OVERLAP else RATIO  # noqa: N806
    CHANNELS: tl.constexpr = 2 * DIM if OVERLAP else DIM  # noqa: N806
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if (position + 1) % RATIO == 0:
        row = tl.load(token_rows + token)
        start = tl.load(starts + row)
        first = tl.load(firsts + row)
        ring = state + tl.load(row_slots + row).to(tl.int64) * slot_stride
        dims = tl.arange(0, DIM)
        top = tl.full((DIM,), float("-inf"), tl.float32)
        total = tl.zeros((DIM,), tl.float32)
        acc = tl.zeros((DIM,), tl.float32)
        for begin in range(0, SIZE, SPAN):
            place = begin + tl.arange(0, SPAN)
            at = position - SIZE + 1 + place
            # Before the first token there is nothing.
            there = (at >= 0) & (place < SIZE)
            is_new = (there & (at >= start))[:, None]
            is_kept = (there & (at < start))[:, None]
            # With overlap, the run before gives the first half of its channels.
            channel = dims[None, :] + tl.where(OVERLAP & (place >= RATIO), DIM, 0)[:, None]
            new_at = made + (first + at - start).to(tl.int64)[:, None] * made_row + channel
            # Places of tokens that are not there are not read.
            kept_at = ring + (tl.maximum(at, 0) % SIZE)[:, None] * (2 * CHANNELS) + channel
            gates = tl.load(new_at + CHANNELS, mask=is_new, other=0.0).to(tl.float32)
            gates += tl.load(kept_at + CHANNELS, mask=is_kept, other=0.0)
            values = tl.load(new_at, mask=is_new, other=0.0).to(tl.float32)
            values += tl.load(kept_at, mask=is_kept, other=0.0)
            gates += tl.load(bias + (place % RATIO)[:, None] * CHANNELS + channel)
            gates = tl.where(there[:, None], gates, float("-inf"))
            new_top = tl.maximum(top, tl.max(gates, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(gates - shift[None, :])
            fade = tl.exp(top - shift)
            total = total * fade + tl.sum(weights, axis=0)
            acc = acc * fade + tl.sum(weights * values, axis=0)
            top = new_top
        mean = acc / total
        normed = mean * tl.rsqrt(tl.sum(mean * mean, axis=0) / DIM + eps) * tl.load(norm + dims)
        even, odd = tl.split(tl.reshape(normed, (DIM // 2, 2)))
        pair = tl.arange(0, DIM // 2) - (DIM // 2 - HALF)
        c = tl.load(cos + token.to(tl.int64) * HALF + pair, mask=pair >= 0, other=1.0)
        s = tl.load(sin + token.to(tl.int64) * HALF + pair, mask=pair >= 0, other=0.0)
        turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (DIM,))
        block = tl.load(block_ids + token).to(tl.int64)
        offset = position // RATIO % rows_per_block
        tl.store(layer + block * block_stride + offset * DIM + dims, turned.to(layer.dtype.element_ty))


def compress(
    made: torch.Tensor,
    state: torch.Tensor,
    layer: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    bias: torch.Tensor,
    angles: Angles,
    tokens: StepTokens,
    *,
    ratio: int,
    overlap: bool,
) -> None:
    """Stores the rows of the runs of `ratio` tokens that a step completes: gated means, normed and turned.

    made [tokens, values and gates] bfloat16 of any row stride, state [slots, values] float32 of the tokens before,
    `layer` the pool's [blocks, rows, dim] view, bias [ratio, channels] float32; angles are those of the first tokens of
    runs that would end at each token."""
    dim = norm.shape[0]
    assert layer.stride()[1:] == (dim, 1), "a block of one layer is contiguous"
    assert made.stride(1) == 1 == state.stride(1), "values lie side by side"
    _compress[(made.shape[0],)](
        made,
        state,
        layer,
        norm,
        bias,
        *angles,
        tokens.positions,
        tokens.block_ids,
        tokens.rows,
        tokens.starts,
        tokens.firsts,
        tokens.slots,
        eps,
        made.stride(0),
        state.stride(0),
        layer.stride(0),
        layer.shape[1],
        DIM=dim,
        HALF=angles[0].shape[1],
        RATIO=ratio,
        OVERLAP=overlap,
        SPAN=min(_SPAN, triton.next_power_of_2(2 * ratio if overlap else ratio)),
        num_warps=4,
        **dependent(),
    )


@triton.jit
def _keep(
    source,
    target,
    positions,
    token_rows,
    lengths,
    row_slots,
    source_row,
    slot_stride,
    width,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    row = tl.load(token_rows + token)
    slot = tl.load(row_slots + row).to(tl.int64)
    position = tl.load(positions + token)
    if (slot >= 0) & (position >= tl.load(lengths + row) - SIZE):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        values = tl.load(source + token.to(tl.int64) * source_row + columns, mask=inside, other=0.0)
        at = target + slot * slot_stride + (position % SIZE) * width + columns
        tl.store(at, values.to(target.dtype.element_ty), mask=inside)


def keep(source: torch.Tensor, target: torch.Tensor, size: int, tokens: StepTokens) -> None:
    """Writes the last `size` tokens of each row of source [tokens, width] at their positions modulo `size` into target
    [slots, size * width]; what needed the values from before the step has read them."""
    count, width = source.shape
    assert source.stride(1) == 1 == target.stride(1), "values lie side by side"
    assert target.shape[1] == size * width, "a slot holds so many tokens"
    block = min(1024, triton.next_power_of_2(width))
    _keep[(count, triton.cdiv(width, block))](
        source,
        target,
        tokens.positions,
        tokens.rows,
        tokens.lengths,
        tokens.slots,
        source.stride(0),
        target.stride(0),
        width,
        SIZE=size,
        BLOCK=block,
        num_warps=2,
        **dependent(),
    )
