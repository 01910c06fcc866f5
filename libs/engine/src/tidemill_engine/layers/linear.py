"""Matrices in the form they have in memory; callers see float32 in and out."""

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """y = x W^T + b: [tokens, in] -> [tokens, out], float32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class FullPrecision:
    """float32 weights, float32 arithmetic."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight.float().contiguous()
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)
