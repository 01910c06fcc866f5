"""Adds up the parts of a product."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_BLOCK = 1024


@triton.jit
def _sum_parts(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.load(parts + places, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + places, mask=inside, other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """float32 [parts, tokens, size] -> bfloat16 [tokens, size]."""
    out = torch.empty(parts.shape[1:], dtype=torch.bfloat16, device=parts.device)
    size = out.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _sum_parts[grid](parts, out, size, PARTS=parts.shape[0], BLOCK=_BLOCK, num_warps=4, **dependent())
    return out
