"""Forms of a matrix in device memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0
_LARGEST_INT8 = 127.0
_BLOCK = 128
_SMALLEST = 1e-12
"""Largest value of a part that is taken for zero."""


@dataclass(frozen=True)
class Weight:
    """[out, in] values; multiplied by their scale they are the matrix."""

    values: torch.Tensor
    """bfloat16, float8_e4m3fn or int8."""
    scale: torch.Tensor | None = None
    """float32 [out], or [out / 128, in / 128] rounded up; None for bfloat16."""

    @property
    def is_fp8(self) -> bool:
        """Activations are rounded to FP8 too."""
        return self.values.dtype == FP8

    @property
    def is_by_block(self) -> bool:
        """A scale for each block of 128 x 128."""
        return self.scale is not None and self.scale.dim() == 2


def plain(weight: torch.Tensor) -> Weight:
    """bfloat16."""
    return Weight(weight.bfloat16())


def fp8_by_channel(weight: torch.Tensor) -> Weight:
    """A scale for each output, such that its largest value is FP8's largest."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=_SMALLEST) / _LARGEST_FP8
    return Weight((weight / scale[:, None]).to(FP8), scale)


def fp8_by_block(weight: torch.Tensor) -> Weight:
    """A scale for each block of 128 x 128; a checkpoint of this form comes back as it was."""
    weight = weight.float()
    scale = _block_maxima(weight).clamp(min=_SMALLEST) / _LARGEST_FP8
    return Weight((weight / spread_blocks(scale, weight.shape)).to(FP8), scale)


def int8_by_channel(weight: torch.Tensor) -> Weight:
    """Symmetric, a scale for each output; activations stay bfloat16."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=_SMALLEST) / _LARGEST_INT8
    return Weight((weight / scale[:, None]).round().to(torch.int8), scale)


FORMATS: dict[str, Callable[[torch.Tensor], Weight]] = {
    "auto": plain,
    "bf16": plain,
    "fp8": fp8_by_channel,
    "fp8_block": fp8_by_block,
    "int8": int8_by_channel,
}
"""By the name that the settings use."""


def spread_blocks(scale: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """[out / 128, in / 128] scales -> [out, in]."""
    return scale.repeat_interleave(_BLOCK, 0)[: shape[0]].repeat_interleave(_BLOCK, 1)[:, : shape[1]]


def _block_maxima(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % _BLOCK, 0, -rows % _BLOCK)).abs()
    return padded.view(padded.shape[0] // _BLOCK, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK).amax((1, 3))
