"""bfloat16 matrices on the device; products accumulate in float32."""

import torch
from torch.nn import functional


class DeviceLinear:
    """y = x W^T + b in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def make_linear(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> DeviceLinear:
    """Rounds a float32 checkpoint once."""
    on_device = None if bias is None else bias.to("cuda", torch.bfloat16)
    return DeviceLinear(weight.to("cuda", torch.bfloat16), on_device)


def float_logits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x W^T without rounding the sums: bfloat16 in, float32 out."""
    torch.ops.aten.mm.dtype_out(x, weight.t(), torch.float32, out=out)
    return out
