"""Residual sum and RMS norm in one pass."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(hidden, delta, weight, out, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(hidden + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * size + columns, x.to(hidden.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = x * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta to hidden [tokens, size] in place and returns the normed sum; weight is float32."""
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
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
