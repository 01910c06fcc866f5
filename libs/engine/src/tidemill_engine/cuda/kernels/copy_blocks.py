"""Copies of whole blocks between the pool and staging memory, at the speed of the memory."""

import torch
import triton
import triton.language as tl

_WORDS = 2048
"""8-byte words of a program."""


@triton.jit
def _copy_blocks(pool, staging, block_ids, words, TO_POOL: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    if TO_POOL:
        tl.store(pool + block * words + at, tl.load(staging + index * words + at, mask=inside), mask=inside)
    else:
        tl.store(staging + index * words + at, tl.load(pool + block * words + at, mask=inside), mask=inside)


def copy_blocks(pool: torch.Tensor, staging: torch.Tensor, block_ids: torch.Tensor, *, to_pool: bool) -> None:
    """pool and staging are int64 [blocks, words]; row i of staging is the pool's block block_ids[i] (int32)."""
    count, words = staging.shape
    grid = (count, triton.cdiv(words, _WORDS))
    _copy_blocks[grid](pool, staging, block_ids, words, TO_POOL=to_pool, BLOCK=_WORDS, num_warps=8)
