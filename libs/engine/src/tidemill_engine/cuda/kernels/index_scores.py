"""The indexer: a score for each row that a query can see."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_KEYS = 128
"""Rows of the pool that a program scores at a time."""
_TILES = 4
"""Such tiles of a program."""
_QUERIES, _FEW_QUERIES = 64, 16
"""Queries of a chunk that share a tile of rows, where there are many and where there are few."""
_MANY = 256
_LEAST_HEADS = 16
_LANES = 64
"""Heads of queries that are multiplied at once: of 32 to 256 the fastest on an H200, and 10 % faster than 32."""


@triton.jit
def _score(
    q,
    weights,
    layer,
    scores,
    visible,
    first_pages,
    indices,
    num_queries,
    width,
    top_k,
    block_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    BQ: tl.constexpr,  # noqa: N803
    AT_ONCE: tl.constexpr,  # noqa: N803
    BK: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_query = tl.program_id(0) * BQ
    last = tl.minimum(first_query + BQ, num_queries) - 1
    most = tl.load(visible + last)
    first_page = tl.load(first_pages + first_query)
    dims = tl.arange(0, DIM)
    begin = tl.program_id(1) * (BK * TILES)
    # Who sees no more than are chosen has nothing to choose.
    end = tl.where(most > top_k, tl.minimum(begin + BK * TILES, most), begin)
    for start in range(begin, end, BK):
        rows = start + tl.arange(0, BK)
        there = rows < most
        page = tl.load(indices + first_page + rows // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        at = layer + page * block_stride + (rows % BLOCK_SIZE) * DIM
        keys = tl.load(at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        for offset in range(0, BQ, AT_ONCE):
            # Heads of several queries beside each other fill the tensor core's tile.
            queries = first_query + offset + tl.arange(0, AT_ONCE)
            lanes = tl.arange(0, AT_ONCE * HEADS)
            head = lanes % HEADS
            query = tl.minimum(first_query + offset + lanes // HEADS, last).to(tl.int64)
            asked = query * NUM_HEADS + head
            known = head < NUM_HEADS
            q_tile = tl.load(q + asked[:, None] * DIM + dims[None, :], mask=known[:, None], other=0.0)
            weight = tl.load(weights + asked, mask=known, other=0.0) * scale
            products = tl.maximum(tl.dot(keys, tl.trans(q_tile)), 0.0) * weight[None, :]
            summed = tl.sum(tl.reshape(products, (BK, AT_ONCE, HEADS)), axis=2)
            scores_at = scores + queries.to(tl.int64)[None, :] * width + rows[:, None]
            tl.store(scores_at, summed, mask=there[:, None] & (queries <= last)[None, :])


def score_rows(
    q: torch.Tensor,
    weights: torch.Tensor,
    layer: torch.Tensor,
    scores: torch.Tensor,
    visible: torch.Tensor,
    first_pages: torch.Tensor,
    indices: torch.Tensor,
    top_k: int,
    *,
    one_table: bool,
) -> None:
    """Writes scores [queries, width] float32 of the rows of each query that sees more than top_k: the sum over heads of
    weights[t, h] * relu(q[t, h] . row) * dim^-0.5.

    q [queries, heads, dim] bfloat16, weights [queries, heads] float32, `layer` the pool's [blocks, block_size, dim]
    view of bfloat16; or q and `layer` float8_e4m3fn, with q's scales in the weights. Query t sees the first visible[t]
    rows of the blocks from indices[first_pages[t]] on; all int32. With `one_table` all queries read the same blocks and
    each sees no fewer rows than the one before it."""
    num_queries, num_heads, dim = q.shape
    width = scores.shape[1]
    assert layer.stride()[1:] == (dim, 1), "a block of one layer is contiguous"
    assert scores.stride() == (width, 1), "scores of a query lie side by side"
    queries = 1
    if one_table:
        queries = _QUERIES if num_queries >= _MANY else _FEW_QUERIES
    heads = max(_LEAST_HEADS, triton.next_power_of_2(num_heads))
    at_once = min(queries, max(1, _LANES // heads))
    _score[(triton.cdiv(num_queries, queries), triton.cdiv(width, _KEYS * _TILES))](
        q,
        weights,
        layer,
        scores,
        visible,
        first_pages,
        indices,
        num_queries,
        width,
        top_k,
        layer.stride(0),
        float(dim**-0.5),
        BLOCK_SIZE=layer.shape[1],
        NUM_HEADS=num_heads,
        HEADS=heads,
        DIM=dim,
        BQ=queries,
        AT_ONCE=at_once,
        BK=_KEYS,
        TILES=_TILES,
        num_warps=4,
        num_stages=3,
        **dependent(),
    )
