"""The gated MLP of a layer on the device."""

import torch

from tidemill_engine.cuda.kernels.parts import sum_parts
from tidemill_engine.cuda.linear import DeviceLinear, GatedLinear
from tidemill_engine.layers.linear import Linear
from tidemill_engine.loading.weights import WeightSource


class DenseMlp:
    """silu(gate) * up, then down."""

    def __init__(
        self, source: WeightSource, prefix: str, hidden: int, inner: int, *, bias: bool = False, limit: float = 0.0
    ) -> None:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = GatedLinear(on_device(source.columns(names, [inner, inner], hidden, bias=bias)), limit)
        self.down = on_device(source.row(f"{prefix}.down_proj", hidden, inner, bias=bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] bfloat16, or its float32 parts."""
        return self.down(self.gate_up(x))


def on_device(matrix: Linear) -> DeviceLinear:
    """A matrix that `LinearMaker` made."""
    assert isinstance(matrix, DeviceLinear)
    return matrix


def whole(product: torch.Tensor) -> torch.Tensor:
    """A product that may have come in parts."""
    return sum_parts(product) if product.dim() == 3 else product
