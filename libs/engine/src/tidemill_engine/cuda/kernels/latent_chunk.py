"""Attention of a chunk of queries over expanded keys and values, piece by piece of the context.

Keys are a head's own values beside turned ones that all heads share. A piece after the first is merged with what the
earlier ones gave, by the logarithm (base 2) of their softmax sums.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.softmax import fold

_LOG2_E = 1.4426950408889634
_LEAST = 16
"""Shortest side of a tensor core's tile."""


@triton.jit
def _attend_piece(
    q,
    q_rope,
    k,
    k_rope,
    v,
    out,
    lse,
    scale,
    num_queries,
    num_keys,
    q_row,
    q_head,
    k_rope_row,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    NOPE: tl.constexpr,  # noqa: N803
    NOPE_TILE: tl.constexpr,  # noqa: N803
    ROPE: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    VALUES_TILE: tl.constexpr,  # noqa: N803
    BM: tl.constexpr,  # noqa: N803
    BN: tl.constexpr,  # noqa: N803
    CAUSAL: tl.constexpr,  # noqa: N803
    MERGE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    queries = first + tl.arange(0, BM)
    known = queries < num_queries
    dims = tl.arange(0, NOPE_TILE)
    turned = tl.arange(0, ROPE)
    values = tl.arange(0, VALUES_TILE)
    held = tl.minimum(queries, num_queries - 1).to(tl.int64)
    q_tile = tl.load(q + held[:, None] * q_row + head * q_head + dims[None, :], mask=(dims < NOPE)[None, :], other=0.0)
    rope_tile = tl.load(q_rope + (held * NUM_HEADS + head)[:, None] * ROPE + turned[None, :])
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, VALUES_TILE), tl.float32)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, first + BM)
    for start in range(0, end, BN):
        keys = start + tl.arange(0, BN)
        there = keys < num_keys
        row = keys.to(tl.int64)
        k_at = k + (row * NUM_HEADS + head)[:, None] * NOPE + dims[None, :]
        k_tile = tl.load(k_at, mask=there[:, None] & (dims < NOPE)[None, :], other=0.0)
        shared = tl.load(k_rope + row[:, None] * k_rope_row + turned[None, :], mask=there[:, None], other=0.0)
        v_at = v + (row * NUM_HEADS + head)[:, None] * VALUES + values[None, :]
        v_tile = tl.load(v_at, mask=there[:, None] & (values < VALUES)[None, :], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        scores = tl.dot(rope_tile, tl.trans(shared), scores) * scale
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= queries[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = fold(scores, top, total)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None])
    result = acc / total[:, None]
    sums = top + tl.log2(total)
    at = out + (held * NUM_HEADS + head)[:, None] * VALUES + values[None, :]
    stored = known[:, None] & (values < VALUES)[None, :]
    sums_at = lse + held * NUM_HEADS + head
    if MERGE:
        before = tl.load(sums_at, mask=known, other=0.0)
        most = tl.maximum(before, sums)
        old = tl.exp2(before - most)
        new = tl.exp2(sums - most)
        earlier = tl.load(at, mask=stored, other=0.0).to(tl.float32)
        result = (earlier * old[:, None] + result * new[:, None]) / (old + new)[:, None]
        sums = most + tl.log2(old + new)
    tl.store(at, result.to(out.dtype.element_ty), mask=stored)
    tl.store(sums_at, sums, mask=known)


def attend_piece(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    k: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    merge: bool,
) -> None:
    """Writes out [queries, heads, values] and lse [queries, heads] float32, or merges into them.

    q [queries, heads, nope] may have any row and head strides, q_rope is [queries, heads, rope]; k [keys, heads, nope],
    k_rope [keys, rope] of any row stride, v [keys, heads, values], all bfloat16. `causal`: key i is query i's own."""
    num_queries, num_heads, nope = q.shape
    values, rope = v.shape[2], q_rope.shape[2]
    wide = nope > 128 or values > 128
    rows = 128 if num_queries > 64 else 64
    _attend_piece[(triton.cdiv(num_queries, rows), num_heads)](
        q,
        q_rope,
        k,
        k_rope,
        v,
        out,
        lse,
        scale * _LOG2_E,
        num_queries,
        k.shape[0],
        q.stride(0),
        q.stride(1),
        k_rope.stride(0),
        NUM_HEADS=num_heads,
        NOPE=nope,
        NOPE_TILE=max(_LEAST, triton.next_power_of_2(nope)),
        ROPE=rope,
        VALUES=values,
        VALUES_TILE=max(_LEAST, triton.next_power_of_2(values)),
        BM=rows,
        BN=32 if wide else 64,
        CAUSAL=causal,
        MERGE=merge,
        num_warps=8 if rows > 64 else 4,
        num_stages=2,
        **dependent(),
    )
