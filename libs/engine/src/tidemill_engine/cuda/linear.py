"""Matrices on the device and the ways to multiply by them; products accumulate in float32.

Which way is fastest depends on shape and number of tokens, so it is measured (`cuda.tuning`) once for all matrices of a
shape; other numbers of tokens take the way of their format. Batch-invariant products have one way only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.nn import functional

from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.matmul import Tiles, matmul
from tidemill_engine.cuda.kernels.quantise import quantise, quantise_blocks
from tidemill_engine.cuda.weight_formats import Weight

INVARIANT_TILES = Tiles(n=128, m=64, k=128, stages=4)
_BLOCK_TILES = Tiles(n=128, m=128, k=128, warps=8, stages=3)
_LEAST_FOR_LIBRARY = 256
"""Tokens."""

M = TypeVar("M")


@dataclass(frozen=True)
class Way(Generic[M]):
    """One way to multiply by a matrix of a kind: [tokens, in] -> [tokens, out] bfloat16, or its float32 parts."""

    name: str
    run: Callable[[M, torch.Tensor], torch.Tensor]


@dataclass
class Choices(Generic[M]):
    """Ways by number of tokens, shared by all matrices of one shape."""

    default: Way[M]
    by_tokens: dict[int, Way[M]] = field(default_factory=dict)

    def run(self, matrix: M, x: torch.Tensor) -> torch.Tensor:
        """Takes the way for x's tokens."""
        return self.by_tokens.get(x.shape[0], self.default).run(matrix, x)


class DeviceLinear:
    """y = x W^T + b; x and y are bfloat16."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, choices: "Choices[DeviceLinear]") -> None:
        self.weight = weight
        self.bias = bias
        self.choices = choices

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out], or float32 parts of it [parts, tokens, out]."""
        return self.choices.run(self, x)

    @property
    def num_bytes(self) -> int:
        """Of the weight with its scales."""
        scale = self.weight.scale
        return self.weight.values.nbytes + (0 if scale is None else scale.nbytes)


class GatedLinear:
    """silu(gate) * up of one product; `limit`, where it is not 0, bounds both (`kernels.gate`)."""

    def __init__(self, linear: DeviceLinear, limit: float = 0.0) -> None:
        self.linear = linear
        self.limit = limit
        self.choices = Choices(Way("product, then gate", _product_then_gate))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.choices.run(self, x)


class LogitsHead:
    """x W^T in float32, for bfloat16 x and W [vocabulary, in]."""

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool) -> None:
        self.weight = weight
        self.tiles: dict[int, Tiles] = {}
        """Own kernel for these numbers of tokens; cuBLAS for others."""
        self._is_invariant = batch_invariant

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes out [tokens, vocabulary]; sums are not rounded."""
        tiles = INVARIANT_TILES if self._is_invariant else self.tiles.get(x.shape[0])
        if tiles is None:
            torch.ops.aten.mm.dtype_out(x, self.weight.t(), torch.float32, out=out)
        else:
            matmul(x, self.weight, tiles=tiles, out=out)


def by_tiles(tiles: Tiles) -> Way[DeviceLinear]:
    """The own kernel."""

    def run(matrix: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
        weight = matrix.weight
        x_scale = None
        if weight.is_fp8:
            x, x_scale = quantise(x, by_block=weight.is_by_block)
        return matmul(x, weight.values, matrix.bias, tiles=tiles, w_scale=weight.scale, x_scale=x_scale)

    return Way(f"n{tiles.n} m{tiles.m} k{tiles.k} s{tiles.splits}", run)


def by_library() -> Way[DeviceLinear]:
    """cuBLAS; INT8 weights are made bfloat16 before, which many tokens pay for."""
    return Way("library", _by_library)


def _by_library(matrix: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = matrix.weight, matrix.bias
    if weight.scale is None:
        return functional.linear(x, weight.values, bias)
    if not weight.is_fp8:
        product = functional.linear(x, weight.values.bfloat16()) * weight.scale
        return (product if bias is None else product + bias).bfloat16()
    x8, x_scale = quantise(x, by_block=False)
    return torch._scaled_mm(
        x8, weight.values.t(), x_scale[:, None], weight.scale[None, :], bias, out_dtype=torch.bfloat16
    )


def by_library_blocks() -> Way[DeviceLinear]:
    """cuBLAS with a scale for each block, from _LEAST_FOR_LIBRARY tokens on; the own kernel for fewer."""
    few = by_tiles(_BLOCK_TILES)

    def run(matrix: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
        return few.run(matrix, x) if x.shape[0] < _LEAST_FOR_LIBRARY else _by_library_blocks(matrix, x)

    return Way("library by block", run)


def fits_library_blocks(outputs: int, width: int) -> bool:
    """cuBLAS takes whole blocks of outputs, and four blocks of inputs at a time."""
    return outputs % 128 == 0 and width % 512 == 0


def _by_library_blocks(matrix: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
    weight, (tokens, width) = matrix.weight, x.shape
    assert weight.scale is not None
    # Whole groups of four tokens; what follows the last token is computed and not returned.
    padded = -(-tokens // 4) * 4
    x8 = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=x.device)
    # A block's scales of all tokens lie side by side.
    x_scale = torch.empty((width // 128, padded), device=x.device).t()
    quantise_blocks(x, x8, x_scale)
    out = torch._scaled_mm(x8, weight.values.t(), x_scale, weight.scale.t(), out_dtype=torch.bfloat16)[:tokens]
    return out if matrix.bias is None else (out + matrix.bias)


def _product_then_gate(gated: GatedLinear, x: torch.Tensor) -> torch.Tensor:
    return silu_mul(gated.linear(x), gated.limit)


class LinearMaker:
    """Makes matrices of one format, as `WeightSource` asks for them."""

    def __init__(self, make_weight: Callable[[torch.Tensor], Weight], *, batch_invariant: bool) -> None:
        self._make_weight = make_weight
        self._is_invariant = batch_invariant
        self._choices: dict[tuple[int, ...], Choices[DeviceLinear]] = {}

    def __call__(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> DeviceLinear:
        """Rounds a checkpoint's matrix once."""
        made = self._make_weight(weight.to("cuda"))
        if self._is_invariant:
            default = by_tiles(INVARIANT_TILES)
        else:
            default = self._default(made)
        choices = self._choices.setdefault(tuple(weight.shape), Choices(default))
        return DeviceLinear(made, None if bias is None else bias.to("cuda", torch.bfloat16), choices)

    def _default(self, weight: Weight) -> Way[DeviceLinear]:
        if not weight.is_by_block:
            return by_library()
        return by_library_blocks() if fits_library_blocks(*weight.values.shape) else by_tiles(_BLOCK_TILES)
