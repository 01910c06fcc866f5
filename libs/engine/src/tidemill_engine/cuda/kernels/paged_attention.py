"""Causal attention of chunks and single tokens over paged KV in one kernel of one shape.

Every query sums the blocks of its context from the first on, in equal steps, whatever else the step holds and wherever
its chunk begins: the result does not depend on the batch. It also reads FP8 pools, which the fast prefill kernels do
not.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.softmax import fold

_LOG2_E = 1.4426950408889634
_ROWS = 64
_TOKENS = 64


@triton.jit
def _attend(
    q,
    layer,
    out,
    tile_rows,
    tile_firsts,
    q_indptr,
    indptr,
    indices,
    last_page_len,
    scale,
    block_stride,
    kv_stride,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    Q_HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BT: tl.constexpr,  # noqa: N803
    COMPUTE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS  # noqa: N806
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    first_token = tl.load(tile_firsts + tile)
    first_query = tl.load(q_indptr + row)
    num_queries = tl.load(q_indptr + row + 1) - first_query
    first_page = tl.load(indptr + row)
    pages = tl.load(indptr + row + 1) - first_page
    length = (pages - 1) * BLOCK_SIZE + tl.load(last_page_len + row)
    dims = tl.arange(0, DIM)
    packed = tl.arange(0, ROWS)
    token = first_token + packed // PACKED
    position = length - num_queries + token
    inside = (token < num_queries) & (packed % PACKED < GROUP)
    place = (first_query + token).to(tl.int64) * Q_HEADS + head * GROUP + packed % PACKED
    q_tile = tl.load(q + place[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0).to(COMPUTE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    end = tl.minimum(length, length - num_queries + first_token + ROWS // PACKED)
    for start in range(0, end, BT):
        tokens = start + tl.arange(0, BT)
        there = tokens < end
        page = tl.load(indices + first_page + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        at = page * block_stride + (tokens % BLOCK_SIZE) * (KV_HEADS * DIM) + head * DIM
        k = tl.load(layer + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        v = tl.load(layer + kv_stride + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k.to(COMPUTE))) * scale
        # Rows past the chunk's end may look at everything that was read: their sums are not stored.
        seen = there[None, :] & (tokens[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = fold(scores, top, total)
        acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * fade[:, None])
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * DIM + dims[None, :], result, mask=inside[:, None])


def tile_tokens(q_heads: int, kv_heads: int) -> int:
    """Query tokens of one program."""
    return int(_ROWS // triton.next_power_of_2(q_heads // kv_heads))


def paged_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    out: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_firsts: torch.Tensor,
    q_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    scale: float,
) -> None:
    """Writes `out` [tokens, heads, dim] like q. Row i's queries q[q_indptr[i] : q_indptr[i + 1]] end its context, whose
    blocks the page table gives; tile j computes `tile_tokens` of row tile_rows[j] from its query tile_firsts[j] on. All
    index tensors are int32; `layer` is the pool's [blocks, 2, block_size, kv heads, dim] view, bfloat16 or
    float8_e4m3fn."""
    q_heads, dim = q.shape[1:]
    kv_heads, block_size = layer.shape[3], layer.shape[2]
    is_fp8 = layer.dtype == torch.float8_e4m3fn
    _attend[(tile_rows.shape[0], kv_heads)](
        q,
        layer,
        out,
        tile_rows,
        tile_firsts,
        q_indptr,
        indptr,
        indices,
        last_page_len,
        scale * _LOG2_E,
        layer.stride(0),
        layer.stride(1),
        BLOCK_SIZE=block_size,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PACKED=triton.next_power_of_2(q_heads // kv_heads),
        ROWS=_ROWS,
        BT=_TOKENS,
        # Each FP8 value is a half precision number.
        COMPUTE=tl.float16 if is_fp8 else tl.bfloat16,
        num_warps=4,
        num_stages=2,
        **dependent(),
    )
