"""Paged attention by the C kernels, which read the pool in place; the rest is the torch reference's."""

import ctypes

import torch

from tidemill_engine.attention.torch_reference import TorchReference
from tidemill_engine.kernels.native import LayerStruct, layer_struct, load
from tidemill_engine.kv_pool import KVPool

LANES = 16
MAX_DIM = 256
MAX_GROUP = 16


class NativeAttention(TorchReference):
    """One call a layer for all decode rows, one for each chunk."""

    name = "native"

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self._kernels = load()
        self._layers: dict[tuple[str, int], LayerStruct] = {}
        self._threads = torch.get_num_threads()

    def paged(self, group: str, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._current()
        struct = self._layer(group, layer, q.shape[1])
        tokens, num_heads, dim = q.shape
        stride = q.stride(0)
        assert k.stride(0) == v.stride(0), "k and v are parts of one projection"
        self._kernels.tm_store_kv(
            struct,
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            tokens,
            batch.block_ids.data_ptr(),
            batch.block_offsets.data_ptr(),
        )
        out = torch.empty((tokens, num_heads * dim))
        scale = dim**-0.5
        if batch.num_decode:
            self._kernels.tm_decode_attention(
                struct,
                q.data_ptr(),
                stride,
                batch.decode_blocks.data_ptr(),
                batch.decode_blocks.shape[1],
                batch.decode_lengths.data_ptr(),
                batch.num_decode,
                scale,
                out.data_ptr(),
                self._threads,
            )
        for chunk in batch.chunks:
            self._kernels.tm_chunk_attention(
                struct,
                q[chunk.first].data_ptr(),
                stride,
                chunk.block_ids.data_ptr(),
                chunk.start,
                chunk.num_tokens,
                scale,
                out[chunk.first].data_ptr(),
                self._threads,
            )
        return out

    def _layer(self, group: str, layer: int, num_heads: int) -> "ctypes._Pointer[LayerStruct]":
        key = (group, layer)
        if key not in self._layers:
            self._layers[key] = layer_struct(self.pool.layer(group, layer), num_heads)
        return ctypes.pointer(self._layers[key])


def unsupported(dim: int, group: int) -> str:
    """Why the kernels cannot attend with this shape; empty when they can."""
    if dim % LANES or dim > MAX_DIM:
        return f"head_dim {dim} is not a multiple of {LANES} up to {MAX_DIM}"
    return f"{group} query heads share a KV head, at most {MAX_GROUP} may" if group > MAX_GROUP else ""
