"""Matrices in the form they have in memory; callers see float32 in and out."""

import ctypes
from typing import Protocol

import torch
from torch.nn import functional

from tidemill_engine.kernels.native import load, matrix_struct
from tidemill_engine.kernels.packing import Packed


class Linear(Protocol):
    """y = x W^T + b: [tokens, in] -> [tokens, out], float32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class FullPrecision:
    """float32 weights, float32 arithmetic by torch: the plain path."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight.float().contiguous()
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """Weights in a packed form, float32 arithmetic by the C kernels."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self._struct = matrix_struct(packed)
        self._reference = ctypes.pointer(self._struct)
        self._run = load().tm_linear
        self._threads = torch.get_num_threads()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.packed.outputs))
        self._run(self._reference, x.data_ptr(), rows, out.data_ptr(), self._threads)
        return out
