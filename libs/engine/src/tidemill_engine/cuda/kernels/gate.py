"""silu(gate) * up in one pass."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent
from tidemill_engine.cuda.kernels.norm import num_parts

_BLOCK = 1024


@triton.jit
def _silu_mul(
    gate_up,
    out,
    inner,
    limit,
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CLAMP: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = (part * tl.num_programs(0) + row) * 2 * inner
        gate += tl.load(gate_up + at + columns, mask=inside, other=0.0)
        up += tl.load(gate_up + at + inner + columns, mask=inside, other=0.0)
    if CLAMP:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * inner + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """[tokens, 2 * inner] bfloat16, or float32 parts [parts, tokens, 2 * inner] -> [tokens, inner] bfloat16. `limit`,
    where it is not 0, bounds the gate above and up on both sides."""
    rows, double = gate_up.shape[-2:]
    inner = double // 2
    out = torch.empty((rows, inner), dtype=torch.bfloat16, device=gate_up.device)
    grid = (rows, triton.cdiv(inner, _BLOCK))
    _silu_mul[grid](
        gate_up, out, inner, limit, PARTS=num_parts(gate_up), BLOCK=_BLOCK, CLAMP=limit > 0, num_warps=4, **dependent()
    )
    return out
