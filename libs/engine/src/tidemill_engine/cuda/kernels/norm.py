"""Residual sum and RMS norm in one pass."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent


@triton.jit
def _add_rms_norm(
    hidden,
    delta,
    weight,
    out,
    size,
    eps,
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(hidden + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        change = tl.load(delta + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            at = (part * tl.num_programs(0) + row) * size
            change += tl.load(delta + at + columns, mask=inside, other=0.0)
        x += change
        tl.store(hidden + row * size + columns, x.to(hidden.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = x * scale * scales
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta (like hidden, or float32 parts [parts, tokens, size]) to hidden [tokens, size] in place and returns
    the normed sum; weight is float32."""
    rows, size = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        size,
        eps,
        PARTS=num_parts(delta),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **dependent(),
    )
    return out


def num_parts(delta: torch.Tensor | None) -> int:
    """Parts that a matrix product is to be summed from; 0 without one."""
    if delta is None:
        return 0
    return delta.shape[0] if delta.dim() == 3 else 1
