"""What stands between the matrices: norms, rotation, gate; by torch or by the C kernels."""

from typing import Protocol

import torch
from torch.nn import functional

from tidemill_engine.kernels.native import load
from tidemill_engine.layers.rotary import rotate


class Elementwise(Protocol):
    """All tensors are float32 and contiguous in their last axis."""

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds delta to hidden in place and returns the normed sum."""

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] with the first `count` heads rotated; may change its input."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second half."""


class TorchElementwise:
    """The plain path."""

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        return functional.rms_norm(hidden, weight.shape, weight, eps)

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat([rotate(heads[:, :count], cos, sin), heads[:, count:]], dim=1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


class NativeElementwise:
    """By the C kernels."""

    def __init__(self) -> None:
        self._kernels = load()
        self._threads = torch.get_num_threads()

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows, size = hidden.shape
        out = torch.empty((rows, size))
        self._kernels.tm_add_rms_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            eps,
            rows,
            size,
            out.data_ptr(),
            self._threads,
        )
        return out

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, _, dim = heads.shape
        self._kernels.tm_rotate(
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            count,
            dim,
            self._threads,
        )
        return heads

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, double = gate_up.shape
        out = torch.empty((rows, double // 2))
        self._kernels.tm_silu_mul(gate_up.data_ptr(), rows, double // 2, out.data_ptr(), self._threads)
        return out
