"""Weights in the layouts that csrc/linear.c reads; q4_1 and q8_0 only as exact images of the values.

A GGUF's Q4_1 block is 32 values q * scale + minimum with q in 0..15 and half-precision scale and minimum; Q8_0 is
q * scale. The values of a dequantised checkpoint give the blocks back, and it is checked that they do so bit for bit.
"""

from dataclasses import dataclass

import torch

PANEL = 16
GROUP = 32
FORMATS = {"fp32": 0, "bf16": 1, "q4_1": 2, "q8_0": 3}


@dataclass(frozen=True)
class Packed:
    """A packed [outputs, inputs] matrix."""

    format: str
    data: torch.Tensor
    """uint8, aligned to 64 bytes."""
    panel_bytes: int
    group_bytes: int
    outputs: int
    inputs: int
    bias: torch.Tensor | None


def pack_float(weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> Packed:
    """ "fp32" or "bf16" (rounds what bfloat16 cannot hold)."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    panels = _panels(weight.to(dtype))
    return _packed(name, panels.transpose(1, 2), GROUP * PANEL * dtype.itemsize, weight, bias)


def pack_q4_1(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed | None:
    """None when the values are not an exact Q4_1 image."""
    if weight.shape[1] % GROUP or weight.dtype != torch.float32:
        return None
    blocks = weight.view(weight.shape[0], -1, GROUP)
    minimum, maximum = blocks.aminmax(dim=-1, keepdim=True)
    scale = _half((maximum - minimum) / 15)
    codes = ((blocks - minimum) / scale).nan_to_num(0.0, 0.0, 0.0).round()
    exact = torch.equal(_half(minimum), minimum) and torch.equal(codes * scale + minimum, blocks)
    if codes.amax() > 15 or not exact:
        return None
    codes = codes.to(torch.uint8)
    pairs = codes[..., :16] | codes[..., 16:] << 4
    parts = [_by_panel(scale.half()), _by_panel(minimum.half()), _by_panel(pairs)]
    return _packed("q4_1", torch.cat(parts, dim=-1), 2 * 2 * PANEL + 16 * PANEL, weight, bias)


def pack_q8_0(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed | None:
    """None when the values are not an exact Q8_0 image."""
    if weight.shape[1] % GROUP or weight.dtype != torch.float32:
        return None
    blocks = weight.view(weight.shape[0], -1, GROUP)
    scale = _half(blocks.abs().amax(dim=-1, keepdim=True) / 127)
    codes = (blocks / scale).nan_to_num(0.0, 0.0, 0.0).round()
    if codes.abs().amax() > 127 or not torch.equal(codes * scale, blocks):
        return None
    parts = [_by_panel(scale.half()), _by_panel(codes.to(torch.int8).view(torch.uint8))]
    return _packed("q8_0", torch.cat(parts, dim=-1), 2 * PANEL + GROUP * PANEL, weight, bias)


def _packed(
    name: str, layout: torch.Tensor, group_bytes: int, weight: torch.Tensor, bias: torch.Tensor | None
) -> Packed:
    raw = layout.contiguous().flatten().view(torch.uint8)
    # Torch aligns to 64 bytes; full vectors of the last panel may be read whole.
    data = torch.empty(raw.numel(), dtype=torch.uint8)
    data.copy_(raw)
    outputs, inputs = weight.shape
    padded = None
    if bias is not None:
        padded = torch.zeros(-(-outputs // PANEL) * PANEL)
        padded[:outputs] = bias
    return Packed(name, data, raw.numel() // (-(-outputs // PANEL)), group_bytes, outputs, inputs, padded)


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, ...] -> [panels, 16, ...], zeros in the last panel's missing rows."""
    missing = -rows.shape[0] % PANEL
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.view(-1, PANEL, *rows.shape[1:])


def _by_panel(parts: torch.Tensor) -> torch.Tensor:
    """[outputs, groups, bytes] -> [panels, groups, all bytes], values of 16 rows beside each other."""
    panels = _panels(parts)
    if parts.dtype == torch.uint8:
        return panels.permute(0, 2, 3, 1).flatten(2)
    return panels.permute(0, 2, 1, 3).contiguous().view(torch.uint8).flatten(2)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()
