"""Norms on q and k, rotary embedding, and the write of k and v into the pool, in one pass over the projection."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.norm import num_parts

_MOST_HEADS = 8


@triton.jit
def _rotate_store(
    qkv,
    q_out,
    layer,
    positions,
    block_ids,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    block_stride,
    kv_stride,
    block_size,
    Q_HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    QK_NORM: tl.constexpr,  # noqa: N803
    KEEP_KEYS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    DIM: tl.constexpr = 2 * HALF  # noqa: N806
    Q_PROGRAMS: tl.constexpr = Q_HEADS // HEADS  # noqa: N806
    KV_PROGRAMS: tl.constexpr = KV_HEADS // HEADS  # noqa: N806
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    position = tl.load(positions + token)
    half = tl.arange(0, HALF)
    heads = program * HEADS + tl.arange(0, HEADS)
    source = qkv + token * (Q_HEADS + 2 * KV_HEADS) * DIM + heads[:, None] * DIM + half[None, :]
    first = tl.load(source).to(tl.float32)
    second = tl.load(source + HALF).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = source + (part * tl.num_programs(0)).to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * DIM
        first += tl.load(at)
        second += tl.load(at + HALF)
    if program < Q_PROGRAMS + KV_PROGRAMS:
        if QK_NORM:
            mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM
            scale = tl.rsqrt(mean + eps)[:, None]
            is_q = program < Q_PROGRAMS
            low = tl.where(is_q, tl.load(q_norm + half), tl.load(k_norm + half))
            high = tl.where(is_q, tl.load(q_norm + HALF + half), tl.load(k_norm + HALF + half))
            first = first * scale * low[None, :]
            second = second * scale * high[None, :]
        c = tl.load(cos + position.to(tl.int64) * HALF + half)[None, :]
        s = tl.load(sin + position.to(tl.int64) * HALF + half)[None, :]
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    # Rounded to bfloat16 first, so that a pool of another type holds roundings of the same numbers.
    low_half = first.to(q_out.dtype.element_ty)
    high_half = second.to(q_out.dtype.element_ty)
    if program < Q_PROGRAMS:
        target = q_out + token * Q_HEADS * DIM + heads[:, None] * DIM + half[None, :]
        tl.store(target, low_half)
        tl.store(target + HALF, high_half)
    else:
        is_v = program >= Q_PROGRAMS + KV_PROGRAMS
        if KEEP_KEYS:
            tl.store(source, low_half)
            tl.store(source + HALF, high_half)
        kv_heads = heads - Q_HEADS - tl.where(is_v, KV_HEADS, 0)
        block = tl.load(block_ids + token).to(tl.int64)
        offset = (position % block_size).to(tl.int64)
        start = block * block_stride + tl.where(is_v, kv_stride, 0) + offset * KV_HEADS * DIM
        kept = layer + start + kv_heads[:, None] * DIM + half[None, :]
        if layer.dtype.element_ty == tl.float8e4nv:
            # Beyond the type's largest number there is only NaN.
            tl.store(kept, tl.clamp(low_half.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv))
            tl.store(kept + HALF, tl.clamp(high_half.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv))
        else:
            tl.store(kept, low_half)
            tl.store(kept + HALF, high_half)


@dataclass(frozen=True)
class HeadShape:
    """Heads of one rank."""

    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def heads_per_program(self) -> int:
        """Largest power of two up to 8 that divides both counts."""
        heads = _MOST_HEADS
        while self.num_heads % heads or self.num_kv_heads % heads:
            heads //= 2
        return heads


def rotate_store(
    qkv: torch.Tensor,
    layer: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    shape: HeadShape,
    *,
    keep_keys: bool = False,
) -> torch.Tensor:
    """Returns rotated q [tokens, heads, dim]; rotated k and v go into `layer`, the pool's [blocks, 2, block_size,
    kv heads, dim] view (bfloat16 or float8_e4m3fn) with any block stride, and with `keep_keys` rotated k takes its
    place in qkv. qkv is [tokens, (heads + 2 * kv heads) * dim] bfloat16, or its float32 parts [parts, ...]; cos and sin
    are [context, dim / 2] float32, positions and block_ids int32."""
    tokens, parts = qkv.shape[-2], num_parts(qkv)
    assert parts == 1 or not keep_keys, "keys are kept in a whole projection"
    out = torch.empty((tokens, shape.num_heads, shape.dim), dtype=torch.bfloat16, device=qkv.device)
    q_norm, k_norm = norms or (cos, cos)
    heads = shape.heads_per_program
    assert layer.stride()[2:] == (shape.num_kv_heads * shape.dim, shape.dim, 1), "a block of one layer is contiguous"
    _rotate_store[(tokens, (shape.num_heads + 2 * shape.num_kv_heads) // heads)](
        qkv,
        out,
        layer,
        positions,
        block_ids,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        layer.stride(0),
        layer.stride(1),
        layer.shape[2],
        Q_HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HALF=shape.dim // 2,
        HEADS=heads,
        QK_NORM=norms is not None,
        KEEP_KEYS=keep_keys,
        PARTS=parts,
        num_warps=max(1, heads * shape.dim // 256),
        **dependent(),
    )
    return out
