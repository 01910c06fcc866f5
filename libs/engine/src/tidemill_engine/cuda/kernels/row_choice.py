"""The best rows of each query by their scores.

The choice never waits for the device and does not depend on the batch: of equal scores the earlier rows are taken. A
threshold is found digit by digit from histograms of the scores' bits, then the rows above it are collected in rising
order. `native/choose_rows.cu` does so by several blocks a query; the kernel here, one program a query, is what it is
compared with, and what Triton's interpreter runs.
"""

import ctypes

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import INTERPRETED, dependent

_SPAN = 4096
"""Scores that the Triton kernel reads at a time."""
_MOST_BLOCKS = 8
"""Of a query: what a cluster may hold."""


def choose_rows(
    scores: torch.Tensor,
    visible: torch.Tensor,
    first_pages: torch.Tensor,
    indices: torch.Tensor,
    top_k: int,
    block_size: int,
) -> torch.Tensor:
    """As `choose_by_passes`, several times faster."""
    if INTERPRETED:
        return choose_by_passes(scores, visible, first_pages, indices, top_k, block_size)
    from tidemill_engine.cuda.native import native

    queries, width = scores.shape
    slots = torch.empty((queries, top_k), dtype=torch.int32, device=scores.device)
    status = native("choose_rows").choose_rows(
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_void_p(visible.data_ptr()),
        ctypes.c_void_p(first_pages.data_ptr()),
        ctypes.c_void_p(indices.data_ptr()),
        ctypes.c_longlong(queries),
        ctypes.c_longlong(width),
        top_k,
        block_size,
        _blocks_of_a_query(queries, scores.device),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status:
        raise RuntimeError(f"choose_rows: CUDA error {status}")
    return slots


def _blocks_of_a_query(queries: int, device: torch.device) -> int:
    """As many as the processors take at once, one on each: twice as many were slower for 64 queries on an H200."""
    room = torch.cuda.get_device_properties(device).multi_processor_count // max(queries, 1)
    return min(_MOST_BLOCKS, 1 << max(room, 1).bit_length() - 1)


@triton.jit
def _ordered(x):
    """Bits that compare as unsigned numbers as the scores do; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _narrow(
    at,
    count,
    threshold,
    room,
    LOW: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
):
    """The digit of SIZE bits from LOW on of the last score that has a place among those that begin like `threshold`,
    and how many of the `room` places are left for scores with that digit."""
    BINS: tl.constexpr = 1 << SIZE  # noqa: N806
    HIGH: tl.constexpr = LOW + SIZE  # noqa: N806
    span = tl.arange(0, SPAN)
    bins = tl.arange(0, BINS)
    seen = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, SPAN):
        keys = _ordered(tl.load(at + start + span, mask=start + span < count, other=0.0))
        same = start + span < count
        if HIGH < 32:
            same = same & ((keys >> HIGH) == (threshold >> HIGH))
        seen += tl.histogram(((keys >> LOW) & (BINS - 1)).to(tl.int32), BINS, mask=same)
    at_least = tl.cumsum(seen, axis=0, reverse=True)
    digit = tl.sum((at_least >= room).to(tl.int32), axis=0) - 1
    above = tl.sum(tl.where(bins == digit, at_least - seen, 0), axis=0)
    return threshold | (digit.to(tl.uint32) << LOW), room - above


@triton.jit
def _choose(
    scores,
    slots,
    visible,
    first_pages,
    indices,
    width,
    top_k,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    query = tl.program_id(0).to(tl.int64)
    count = tl.load(visible + query)
    first_page = tl.load(first_pages + query)
    at = scores + query * width
    span = tl.arange(0, SPAN)
    room = tl.minimum(count, top_k)
    threshold = tl.full((), 0, tl.uint32)
    if count > top_k:
        threshold, room = _narrow(at, count, threshold, room, 21, 11, SPAN)
        threshold, room = _narrow(at, count, threshold, room, 10, 11, SPAN)
        threshold, room = _narrow(at, count, threshold, room, 0, 10, SPAN)
    # `room` of those that equal the threshold are taken, the earlier ones.
    taken = tl.full((), 0, tl.int32)
    equals = tl.full((), 0, tl.int32)
    for start in range(0, count, SPAN):
        rows = start + span
        there = rows < count
        keys = _ordered(tl.load(at + rows, mask=there, other=0.0))
        equal = there & (keys == threshold)
        rank = equals + tl.cumsum(equal.to(tl.int32), axis=0)
        take = there & ((keys > threshold) | (equal & (rank <= room)))
        if count <= top_k:
            take = there
        place = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        page = tl.load(indices + first_page + rows // BLOCK_SIZE, mask=take, other=0)
        tl.store(slots + query * top_k + place, page * BLOCK_SIZE + rows % BLOCK_SIZE, mask=take)
        taken += tl.sum(take.to(tl.int32), axis=0)
        equals += tl.sum(equal.to(tl.int32), axis=0)


def choose_by_passes(
    scores: torch.Tensor,
    visible: torch.Tensor,
    first_pages: torch.Tensor,
    indices: torch.Tensor,
    top_k: int,
    block_size: int,
) -> torch.Tensor:
    """[queries, top_k] int32 places (block * block_size + offset) of the best min(visible, top_k) rows of each query in
    rising order, of equal ones the earlier; what follows them is not written. Other arguments as in `score_rows`."""
    slots = torch.empty((scores.shape[0], top_k), dtype=torch.int32, device=scores.device)
    _choose[(scores.shape[0],)](
        scores,
        slots,
        visible,
        first_pages,
        indices,
        scores.shape[1],
        top_k,
        BLOCK_SIZE=block_size,
        SPAN=_SPAN,
        num_warps=8,
        **dependent(),
    )
    return slots
