"""The C kernels as Python functions over torch tensors."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache

import torch

from tidemill_engine.kernels.build import library
from tidemill_engine.kernels.packing import FORMATS, Packed


class MatrixStruct(ctypes.Structure):
    """`Matrix` of csrc/linear.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("panel_bytes", c_int64),
        ("group_bytes", c_int64),
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of csrc/attention.c."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("bf16", c_int32),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("group", c_int32),
        ("dim", c_int32),
    )


_MATRIX, _LAYER = POINTER(MatrixStruct), POINTER(LayerStruct)
_INT, _POINTER = c_int32, c_void_p
_SIGNATURES = {
    "tm_linear": (_MATRIX, _POINTER, _INT, _POINTER, _INT),
    "tm_add_rms_norm": (_POINTER, _POINTER, _POINTER, c_float, _INT, _INT, _POINTER, _INT),
    "tm_rotate": (_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "tm_silu_mul": (_POINTER, _INT, _INT, _POINTER, _INT),
    "tm_store_kv": (_LAYER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER),
    "tm_decode_attention": (_LAYER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, c_float, _POINTER, _INT),
    "tm_chunk_attention": (_LAYER, _POINTER, _INT, _POINTER, _INT, _INT, c_float, _POINTER, _INT),
}


@lru_cache(1)
def load() -> ctypes.CDLL:
    """Builds if needed and asks the system for the tile unit; raises KernelsUnavailable."""
    kernels = ctypes.CDLL(str(library()))
    for name, arguments in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    kernels.tm_init()
    return kernels


def has_tile_unit() -> bool:
    """Whether products of many rows run on AMX."""
    return bool(load().tm_init())


def matrix_struct(packed: Packed) -> MatrixStruct:
    """Points into the packed tensors, which the caller keeps."""
    return MatrixStruct(
        packed.data.data_ptr(),
        None if packed.bias is None else packed.bias.data_ptr(),
        packed.panel_bytes,
        packed.group_bytes,
        FORMATS[packed.format],
        packed.outputs,
        packed.inputs,
    )


def layer_struct(layer: torch.Tensor, num_heads: int) -> LayerStruct:
    """For a [blocks, 2, block_size, kv heads, dim] view of the pool."""
    _, _, block_size, kv_heads, dim = layer.shape
    assert layer.stride(-1) == 1, "values of a head lie beside each other"
    assert layer.stride(-2) == dim, "heads of a token lie beside each other"
    return LayerStruct(
        layer.data_ptr(),
        layer[:, 1].data_ptr(),
        layer.stride(0),
        layer.stride(2),
        int(layer.dtype == torch.bfloat16),
        block_size,
        kv_heads,
        num_heads // kv_heads,
        dim,
    )
