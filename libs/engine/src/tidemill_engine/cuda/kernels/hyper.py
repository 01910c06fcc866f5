"""Hyper-connections: the streams of a residual summed for a layer, and what it makes spread over them again.

Two launches stand between two layers. `spread_weigh` spreads the output of the one before over the streams and begins
the products by which the next one is weighed; hidden values are cut into parts, so that one token fills the device.
`collapse` adds the parts up, makes the weights (`layers.hyper` says which), sums the streams and norms the sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_VALUES = 128
"""Hidden values of a part."""
_TOKENS = 16
"""Of a program; with 64, whose sums do not fit the registers, 8,192 tokens took 2 ms on an H200."""
_LEAST_LANES = 16


@dataclass(frozen=True)
class HyperSite:
    """Weights of one site."""

    high: torch.Tensor
    """[lanes, streams * hidden] bfloat16: the matrix, filled up with zeros."""
    low: torch.Tensor
    """What rounding left of it; both together have 16 bits."""
    base: torch.Tensor
    scale: torch.Tensor
    """float32, one for each kind of weight."""
    norm_eps: float
    eps: float
    steps: int
    """Of Sinkhorn; 0 where the streams end."""


@dataclass(frozen=True)
class Mixing:
    """How a layer's output goes back; float32."""

    post: torch.Tensor
    """[tokens, streams]"""
    comb: torch.Tensor
    """[tokens, streams, streams]: the first axis is summed over."""


def hyper_site(
    matrix: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, norm_eps: float, eps: float, steps: int
) -> HyperSite:
    """matrix [weights, streams * hidden], base and scale float32."""
    count, width = matrix.shape
    # The last lane is the sum of squares.
    lanes = max(_LEAST_LANES, triton.next_power_of_2(count + 1))
    padded = torch.zeros((lanes, width), dtype=torch.float32, device=matrix.device)
    padded[:count] = matrix
    high = padded.bfloat16()
    return HyperSite(high, (padded - high.float()).bfloat16(), base, scale, norm_eps, eps, steps)


@triton.jit
def _spread_weigh(
    streams,
    output,
    post,
    comb,
    spread,
    high,
    low,
    parts,
    tokens,
    hidden,
    STREAMS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    BM: tl.constexpr,  # noqa: N803
    BH: tl.constexpr,  # noqa: N803
    SPREAD: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    known = m < tokens
    # Tokens past the end read the last one and are not stored.
    row = tl.minimum(m, tokens - 1).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = (h < hidden)[None, :]
    lanes = tl.arange(0, LANES)
    at = row[:, None] * (STREAMS * hidden) + h[None, :]
    if SPREAD:
        made = tl.load(output + row[:, None] * hidden + h[None, :], mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros((BM, LANES), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for i in tl.static_range(STREAMS):
        if SPREAD:
            x = made * tl.load(post + row * STREAMS + i)[:, None]
            for j in tl.static_range(STREAMS):
                share = tl.load(comb + (row * STREAMS + j) * STREAMS + i)
                x += share[:, None] * tl.load(streams + at + j * hidden, mask=inside, other=0.0).to(tl.float32)
            kept = x.to(tl.bfloat16)
            tl.store(spread + at + i * hidden, kept, mask=known[:, None] & inside)
        else:
            kept = tl.load(streams + at + i * hidden, mask=inside, other=0.0)
        of_stream = lanes[:, None] * (STREAMS * hidden) + i * hidden + h[None, :]
        acc = tl.dot(kept, tl.trans(tl.load(high + of_stream, mask=inside, other=0.0)), acc)
        acc = tl.dot(kept, tl.trans(tl.load(low + of_stream, mask=inside, other=0.0)), acc)
        squares += tl.sum(kept.to(tl.float32) * kept.to(tl.float32), axis=1)
    acc = tl.where((lanes == LANES - 1)[None, :], squares[:, None], acc)
    target = parts + (tl.program_id(1).to(tl.int64) * tokens + row)[:, None] * LANES + lanes[None, :]
    tl.store(target, acc, mask=known[:, None])


def spread_weigh(
    streams: torch.Tensor, output: torch.Tensor | None, mixing: Mixing | None, site: HyperSite
) -> tuple[torch.Tensor, torch.Tensor]:
    """The streams [tokens, streams, hidden] bfloat16 after a layer's output [tokens, hidden] (both as they are, where
    there was none), and parts [parts, tokens, lanes] float32 of the products with the next site's matrix."""
    tokens, count, hidden = streams.shape
    lanes = site.high.shape[0]
    spread = streams if output is None else torch.empty_like(streams)
    num_parts = triton.cdiv(hidden, _VALUES)
    parts = torch.empty((num_parts, tokens, lanes), dtype=torch.float32, device=streams.device)
    _spread_weigh[(triton.cdiv(tokens, _TOKENS), num_parts)](
        streams,
        streams if output is None else output,
        parts if mixing is None else mixing.post,
        parts if mixing is None else mixing.comb,
        spread,
        site.high,
        site.low,
        parts,
        tokens,
        hidden,
        STREAMS=count,
        LANES=lanes,
        BM=_TOKENS,
        BH=_VALUES,
        SPREAD=output is not None,
        num_warps=4,
        **dependent(),
    )
    return spread, parts


@triton.jit
def _collapse(
    streams,
    parts,
    base,
    scale,
    norm,
    out,
    post,
    comb,
    num_parts,
    tokens,
    hidden,
    norm_eps,
    eps,
    last_eps,
    STREAMS: tl.constexpr,  # noqa: N803
    S: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < num_parts
    s = tl.arange(0, S)
    valid = s < STREAMS
    rows = parts + (part.to(tl.int64) * tokens + token) * LANES
    squares = tl.sum(tl.load(rows + LANES - 1, mask=there, other=0.0), axis=0)
    unit = tl.rsqrt(squares / (STREAMS * hidden) + norm_eps)
    both = there[:, None] & valid[None, :]
    pre = tl.sum(tl.load(rows[:, None] + s[None, :], mask=both, other=0.0), axis=0) * unit
    pre = tl.sigmoid(pre * tl.load(scale) + tl.load(base + s, mask=valid, other=0.0)) + eps
    if STEPS > 0:
        after = tl.sum(tl.load(rows[:, None] + STREAMS + s[None, :], mask=both, other=0.0), axis=0) * unit
        after = after * tl.load(scale + 1) + tl.load(base + STREAMS + s, mask=valid, other=0.0)
        tl.store(post + token * STREAMS + s, 2 * tl.sigmoid(after), mask=valid)
        pair = s[:, None] * STREAMS + s[None, :]
        ok = valid[:, None] & valid[None, :]
        mixing = tl.load(
            rows[:, None, None] + 2 * STREAMS + pair[None, :, :], mask=there[:, None, None] & ok[None, :, :], other=0.0
        )
        mixing = tl.sum(mixing, axis=0) * unit * tl.load(scale + 2)
        mixing = tl.where(ok, mixing + tl.load(base + 2 * STREAMS + pair, mask=ok, other=0.0), float("-inf"))
        top = tl.where(valid, tl.max(mixing, axis=1), 0.0)
        mixing = tl.exp(mixing - top[:, None])
        mixing = mixing / tl.where(valid, tl.sum(mixing, axis=1), 1.0)[:, None]
        mixing = tl.where(ok, mixing + eps, 0.0)
        mixing = mixing / (tl.sum(mixing, axis=0) + eps)[None, :]
        for _ in range(STEPS - 1):
            mixing = mixing / (tl.sum(mixing, axis=1) + eps)[:, None]
            mixing = mixing / (tl.sum(mixing, axis=0) + eps)[None, :]
        tl.store(comb + token * (STREAMS * STREAMS) + pair, mixing, mask=ok)
    h = tl.arange(0, BLOCK)
    inside = h < hidden
    summed = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(STREAMS):
        share = tl.sum(tl.where(s == i, pre, 0.0), axis=0)
        at = streams + (token * STREAMS + i) * hidden + h
        summed += share * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(summed * summed, axis=0) / hidden + last_eps)
    normed = summed * unit * tl.load(norm + h, mask=inside, other=0.0)
    tl.store(out + token * hidden + h, normed.to(out.dtype.element_ty), mask=inside)


def collapse(
    streams: torch.Tensor, parts: torch.Tensor, site: HyperSite, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Mixing]:
    """What a layer reads, [tokens, hidden] bfloat16: the sum of the streams, normed by `norm` float32; and how its
    output goes back."""
    tokens, count, hidden = streams.shape
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=streams.device)
    mixing = Mixing(
        torch.empty((tokens, count), dtype=torch.float32, device=streams.device),
        torch.empty((tokens, count, count), dtype=torch.float32, device=streams.device),
    )
    block = triton.next_power_of_2(hidden)
    _collapse[(tokens,)](
        streams,
        parts,
        site.base,
        site.scale,
        norm,
        out,
        mixing.post,
        mixing.comb,
        parts.shape[0],
        tokens,
        hidden,
        site.norm_eps,
        site.eps,
        eps,
        STREAMS=count,
        S=max(2, triton.next_power_of_2(count)),
        LANES=parts.shape[2],
        PARTS=triton.next_power_of_2(parts.shape[0]),
        BLOCK=block,
        STEPS=site.steps,
        num_warps=min(16, max(1, block // 512)),
        **dependent(),
    )
    return out, mixing
