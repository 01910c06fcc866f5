"""The pool in device memory; canonical bytes leave and enter through the host."""

from collections.abc import Sequence

import numpy as np
import torch

from tidemill_engine.kv_groups import KVGroupSpec, canonical_dtype, group_head_range
from tidemill_engine.kv_pool import TORCH_DTYPES, KVPool, slab_shape


class CudaKVPool(KVPool):
    """Paged groups only; work is queued behind the steps that were started before."""

    def gather(
        self,
        block_ids: Sequence[int],
        head_start: int,
        head_end: int,
        sequence_slot: int = -1,
        snapshot_ids: Sequence[int] = (),
        per_block_snapshots: bool = False,
    ) -> np.ndarray:
        """uint8 bytes in canonical form, values in the pool's own dtype."""
        blocks = torch.tensor(block_ids, dtype=torch.int64, device="cuda")
        # [blocks, bytes of the block in each group]: blocks follow each other, groups lie inside a block.
        parts = []
        for spec in self.groups:
            slab = self._held_heads(spec, head_start, head_end)
            taken = slab.index_select(0, blocks).contiguous()
            parts.append(taken.view(len(block_ids), -1).view(torch.uint8))
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        data: np.ndarray = joined.cpu().numpy().reshape(-1)
        return data

    def scatter(
        self,
        data: np.ndarray,
        block_ids: Sequence[int],
        head_start: int,
        head_end: int,
        source_dtype: str,
        sequence_slot: int = -1,
        snapshot_ids: Sequence[int] = (),
        per_block_snapshots: bool = False,
    ) -> None:
        """Writes canonical bytes with values in `source_dtype`; raises ValueError on a wrong size."""
        expected = self.canonical_bytes(len(block_ids), head_start, head_end, source_dtype, False)
        if data.nbytes != expected:
            raise ValueError(f"{data.nbytes} bytes do not fit the canonical form of {len(block_ids)} blocks")
        blocks = torch.tensor(block_ids, dtype=torch.int64, device="cuda")
        writable = data if data.flags.writeable else data.copy()
        by_block = torch.from_numpy(writable).cuda().view(len(block_ids), -1)
        start = 0
        for spec in self.groups:
            slab = self._held_heads(spec, head_start, head_end)
            dtype = TORCH_DTYPES[canonical_dtype(spec, source_dtype)]
            size = slab[0].numel() * dtype.itemsize
            values = by_block[:, start : start + size].contiguous().view(dtype)
            slab[blocks] = values.view(len(block_ids), *slab.shape[1:]).to(slab.dtype)
            start += size
        torch.cuda.current_stream().synchronize()

    def _held_heads(self, spec: KVGroupSpec, head_start: int, head_end: int) -> torch.Tensor:
        if not self.head_range[0] <= head_start <= head_end <= self.head_range[1]:
            raise ValueError(f"heads [{head_start}, {head_end}) are outside the rank's {self.head_range}")
        held_start, _ = group_head_range(self.groups, spec, *self.head_range)
        start, end = group_head_range(self.groups, spec, head_start, head_end)
        return self.slabs[spec.name][..., start - held_start : end - held_start, :]

    def _zeros(self, spec: KVGroupSpec, rows: int) -> torch.Tensor:
        start, end = group_head_range(self.groups, spec, *self.head_range)
        shape = slab_shape(spec, rows, end - start, self.block_size)
        return torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype], device="cuda")
