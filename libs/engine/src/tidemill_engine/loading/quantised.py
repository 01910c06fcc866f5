"""Matrices stored as FP8 or FP4 with a scale for each block of them, turned back into what they stand for.

FP8 (e4m3) comes with one scale for 128 x 128 values; FP4 (e2m1, two in a byte, the even column in the low half) with
one for 32 values of a row. Scales are float32 or powers of two (e8m0, also as plain bytes). NVFP4 is FP4 with a scale
in e4m3 for 16 values of a row and one factor for the whole matrix, by which ModelOpt multiplies and compressed-tensors
divides.
"""

import torch

from tidemill_engine.loading.errors import CheckpointError

FP8_DTYPE = "F8_E4M3"
FP4_DTYPES = ("I8", "U8", "F4")
BLOCK_LENGTHS = (128, 64, 32, 16)
PACKED = "_packed"
"""What compressed-tensors appends to the names of matrices of two values in a byte."""
_FP4_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_VALUES = torch.cat([_FP4_SIZES, -_FP4_SIZES])


def scale_names(name: str) -> tuple[str, ...]:
    """Where the scales of a matrix may be stored."""
    name = name.removesuffix(PACKED)
    return (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale", f"{name}_scale")


def factor_names(name: str) -> tuple[str, str]:
    """Where NVFP4's factor of the whole matrix may be stored: one that multiplies, and one that divides."""
    name = name.removesuffix(PACKED)
    return f"{name}_scale_2", f"{name}_global_scale"


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 2] bytes -> [rows, columns] float32."""
    codes = packed.contiguous().view(torch.uint8)
    pairs = torch.stack([_FP4_VALUES[(codes & 15).long()], _FP4_VALUES[(codes >> 4).long()]], dim=-1)
    return pairs.flatten(-2)


def dequantise(
    name: str,
    values: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, int],
    first: tuple[int, int],
    factor: float = 1.0,
) -> torch.Tensor:
    """The part of a [rows, columns] matrix of `shape` that starts at `first`; `values` are that part, `scales` those of
    the whole matrix, each times `factor`. bfloat16 where all are powers of two, so that nothing is rounded, else
    float32."""
    factors = scale_values(scales) * factor
    rows = block_places(name, values.shape[0], first[0], shape[0], factors.shape[0])
    columns = block_places(name, values.shape[1], first[1], shape[1], factors.shape[1])
    exact = bool((torch.frexp(factors).mantissa == 0.5).all())
    whole = values.float() * factors[rows][:, columns]
    return whole.bfloat16() if exact else whole


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """float32 factors."""
    if scales.dtype == torch.uint8:
        return scales.view(torch.float8_e8m0fnu).float()
    return scales.float()


def block_places(name: str, count: int, first: int, size: int, blocks: int) -> torch.Tensor:
    """Which block each of `count` places from `first` belongs to."""
    for length in (*BLOCK_LENGTHS, size // blocks):
        if length and -(-size // length) == blocks:
            return torch.arange(first, first + count) // length
    raise CheckpointError(f"tensor {name}: {blocks} scales do not fit {size} values")
