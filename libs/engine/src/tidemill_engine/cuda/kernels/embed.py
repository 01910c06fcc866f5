"""Embedding lookup of tokens that the host knows and of tokens that only the device knows."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent


@triton.jit
def _embed(
    token_ids,
    rows,
    row_tokens,
    table,
    out,
    known_ids,
    size,
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + token)
    if token_id < 0:
        token_id = tl.load(row_tokens + tl.load(rows + token))
    tl.store(known_ids + token, token_id)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(table + token_id.to(tl.int64) * size + columns, mask=inside)
    tl.store(out + token * size + columns, values, mask=inside)


def embed(
    token_ids: torch.Tensor, rows: torch.Tensor, row_tokens: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, size] and the ids [tokens] int32 that they are of; a token id of -1 stands for the last token drawn for
    the runner's row `rows` names."""
    tokens, size = token_ids.shape[0], table.shape[1]
    out = torch.empty((tokens, size), dtype=table.dtype, device=table.device)
    known_ids = torch.empty_like(token_ids)
    block = triton.next_power_of_2(size)
    _embed[(tokens,)](
        token_ids,
        rows,
        row_tokens,
        table,
        out,
        known_ids,
        size,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **dependent(),
    )
    return out, known_ids
