"""silu(gate) * up in one pass."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, inner, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * inner] -> [tokens, inner]."""
    rows, double = gate_up.shape
    inner = double // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(inner, _BLOCK))](gate_up, out, inner, BLOCK=_BLOCK, num_warps=4)
    return out
