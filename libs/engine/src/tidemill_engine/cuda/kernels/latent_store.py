"""What is kept of a token: norms, rotary embedding, and the write into the pool, in one pass over the projections."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_HEADS = 8
"""Query heads of a program."""


@triton.jit
def _store_latent(
    q,
    q_rope,
    kv,
    layer,
    positions,
    block_ids,
    cos,
    sin,
    norm,
    eps,
    block_stride,
    block_size,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    NOPE: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ROPE: tl.constexpr = 2 * HALF  # noqa: N806
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    position = tl.load(positions + token)
    half = tl.arange(0, HALF)
    # Values that turn together lie beside each other, or half a head apart; they are kept half a head apart.
    low = 2 * half if INTERLEAVED else half
    high = 2 * half + 1 if INTERLEAVED else half + HALF
    c = tl.load(cos + position.to(tl.int64) * HALF + half)
    s = tl.load(sin + position.to(tl.int64) * HALF + half)
    if program == 0:
        row = kv + token * (RANK + ROPE)
        block = tl.load(block_ids + token).to(tl.int64)
        kept = layer + block * block_stride + (position % block_size) * (RANK + ROPE)
        dims = tl.arange(0, RANK)
        x = tl.load(row + dims).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
        tl.store(kept + dims, (x * scale * tl.load(norm + dims)).to(layer.dtype.element_ty))
        key_first = tl.load(row + RANK + low).to(tl.float32)
        key_second = tl.load(row + RANK + high).to(tl.float32)
        tl.store(kept + RANK + half, (key_first * c - key_second * s).to(layer.dtype.element_ty))
        tl.store(kept + RANK + HALF + half, (key_second * c + key_first * s).to(layer.dtype.element_ty))
    else:
        heads = (program - 1) * HEADS + tl.arange(0, HEADS)
        there = (heads < NUM_HEADS)[:, None]
        source = q + (token * NUM_HEADS + heads)[:, None] * (NOPE + ROPE) + NOPE
        first = tl.load(source + low[None, :], mask=there, other=0.0).to(tl.float32)
        second = tl.load(source + high[None, :], mask=there, other=0.0).to(tl.float32)
        target = q_rope + (token * NUM_HEADS + heads)[:, None] * ROPE + half[None, :]
        tl.store(target, (first * c[None, :] - second * s[None, :]).to(q_rope.dtype.element_ty), mask=there)
        tl.store(target + HALF, (second * c[None, :] + first * s[None, :]).to(q_rope.dtype.element_ty), mask=there)


def store_latent(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Returns the turned part of q [tokens, heads, nope + rope]: [tokens, heads, rope] bfloat16. The normed latent and
    the turned key of kv [tokens, rank + rope] go into `layer`, the pool's [blocks, block_size, rank + rope] view with
    any block stride. cos and sin are [context, rope / 2] float32, norm [rank] float32, positions and block_ids
    int32."""
    tokens, num_heads, width = q.shape
    rank, half = norm.shape[0], cos.shape[1]
    assert layer.stride()[1:] == (rank + 2 * half, 1), "a block of one layer is contiguous"
    q_rope = torch.empty((tokens, num_heads, 2 * half), dtype=torch.bfloat16, device=q.device)
    _store_latent[(tokens, 1 + triton.cdiv(num_heads, _HEADS))](
        q,
        q_rope,
        kv,
        layer,
        positions,
        block_ids,
        cos,
        sin,
        norm,
        eps,
        layer.stride(0),
        layer.shape[1],
        NUM_HEADS=num_heads,
        HEADS=_HEADS,
        NOPE=width - 2 * half,
        RANK=rank,
        HALF=half,
        INTERLEAVED=interleaved,
        num_warps=2,
        **dependent(),
    )
    return q_rope


@triton.jit
def _store_index(
    q,
    q_out,
    key,
    layer,
    fast_layer,
    q_scales,
    positions,
    block_ids,
    cos,
    sin,
    norm,
    bias,
    eps,
    block_stride,
    fast_stride,
    block_size,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    FAST: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    position = tl.load(positions + token)
    dims = tl.arange(0, DIM)
    turns = dims < 2 * HALF
    # The first values turn; each reads the one that turns with it, and those of a pair move half a head apart.
    place = dims % HALF
    is_second = (dims >= HALF) & turns
    own = tl.where(is_second, 2 * place + 1, 2 * place) if INTERLEAVED else dims
    other = (
        tl.where(is_second, 2 * place, 2 * place + 1) if INTERLEAVED else tl.where(is_second, dims - HALF, dims + HALF)
    )
    own = tl.where(turns, own, dims)
    other = tl.where(turns, other, dims)
    c = tl.load(cos + position.to(tl.int64) * HALF + place, mask=turns, other=1.0)
    s = tl.load(sin + position.to(tl.int64) * HALF + place, mask=turns, other=0.0)
    s = tl.where(is_second, s, -s)
    if program == 0:
        source = key + token * DIM
        x = tl.load(source + own).to(tl.float32)
        y = tl.load(source + other).to(tl.float32)
        mean = tl.sum(x, axis=0) / DIM
        scale = tl.rsqrt(tl.sum((x - mean) * (x - mean), axis=0) / DIM + eps)
        x = (x - mean) * scale * tl.load(norm + own) + tl.load(bias + own)
        y = (y - mean) * scale * tl.load(norm + other) + tl.load(bias + other)
        block = tl.load(block_ids + token).to(tl.int64)
        offset = (position % block_size) * DIM + dims
        made = (x * c + y * s).to(layer.dtype.element_ty)
        tl.store(layer + block * block_stride + offset, made)
        if FAST:
            # A rounding of what is kept, so that blocks that come from elsewhere have the same.
            rounded = tl.clamp(made.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv)
            tl.store(fast_layer + block * fast_stride + offset, rounded)
    else:
        at = (token * NUM_HEADS + program - 1) * DIM
        x = tl.load(q + at + own).to(tl.float32)
        y = tl.load(q + at + other).to(tl.float32)
        turned = x * c + y * s
        if FAST:
            scale = tl.maximum(tl.max(tl.abs(turned), axis=0), 1e-12) / 448.0
            tl.store(q_scales + token * NUM_HEADS + program - 1, scale)
            turned = turned / scale
        tl.store(q_out + at + dims, turned.to(q_out.dtype.element_ty))


def store_index(
    q: torch.Tensor,
    key: torch.Tensor,
    layer: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    *,
    interleaved: bool,
    fast_layer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns q [tokens, heads, dim] with the first values of each head turned. With `fast_layer`, a view like `layer`
    of float8_e4m3fn, it takes the key's rounding, and q is of that type too: then its scales, float32 [tokens, heads],
    come beside it. The layer-normed (weight and bias
    float32) and turned key [tokens, dim] goes into `layer`, the pool's [blocks, block_size, dim] view. cos and sin are
    [context, turning values / 2] float32, positions and block_ids int32."""
    tokens, num_heads, dim = q.shape
    assert layer.stride()[1:] == (dim, 1), "a block of one layer is contiguous"
    out = torch.empty_like(q, dtype=q.dtype if fast_layer is None else fast_layer.dtype)
    scales = None
    if fast_layer is not None:
        assert fast_layer.stride()[1:] == (dim, 1), "a block of one layer is contiguous"
        scales = torch.empty((tokens, num_heads), dtype=torch.float32, device=q.device)
    _store_index[(tokens, 1 + num_heads)](
        q,
        out,
        key,
        layer,
        layer if fast_layer is None else fast_layer,
        out if scales is None else scales,
        positions,
        block_ids,
        cos,
        sin,
        *norm,
        eps,
        layer.stride(0),
        0 if fast_layer is None else fast_layer.stride(0),
        layer.shape[1],
        NUM_HEADS=num_heads,
        DIM=dim,
        HALF=cos.shape[1],
        INTERLEAVED=interleaved,
        FAST=fast_layer is not None,
        num_warps=1,
        **dependent(),
    )
    return out, scales
