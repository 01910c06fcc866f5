"""The pool in device memory; canonical bytes leave and enter by a stream of their own.

The stream waits for the steps that were started before, not for those that come after, and steps do not wait for it:
who asks for bytes waits on the host until they are there, and only then tells anyone who could use them.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tidemill_engine.cuda.kernels.copy_blocks import copy_blocks
from tidemill_engine.kv_groups import KVGroupSpec, canonical_dtype, group_head_range, is_per_sequence
from tidemill_engine.kv_pool import TORCH_DTYPES, KVPool, slab_shape


class CudaKVPool(KVPool):
    """The same slabs as on the CPU."""

    followers: list[Callable[[torch.Tensor], None]]
    """Told of blocks [blocks] int32 that were written from elsewhere, on the stream that wrote them, before anybody
    reads them."""

    def bind_thread(self) -> None:
        """Lets the calling thread, and UCX on it, use the pool's device."""
        torch.cuda.set_device(self._device)

    @property
    def is_idle(self) -> bool:
        """No step runs, so that a copy takes no longer than its bytes."""
        return bool(torch.cuda.default_stream(self._device).query())

    def gather(
        self,
        block_ids: Sequence[int],
        head_start: int,
        head_end: int,
        sequence_slot: int = -1,
        snapshot_ids: Sequence[int] = (),
        per_block_snapshots: bool = False,
    ) -> np.ndarray:
        """uint8 bytes in canonical form in pinned memory, values in the pool's own dtype."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            joined = self._joined(block_ids, head_start, head_end)
            if self.snapshots:
                joined = self._with_sequence(
                    joined, len(block_ids), head_start, head_end, sequence_slot, snapshot_ids, per_block_snapshots
                )
            data = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
            data.copy_(joined, non_blocking=True)
        stream.synchronize()
        return data.numpy()

    def gather_on_device(self, block_ids: Sequence[int], head_start: int, head_end: int) -> torch.Tensor:
        """The same bytes in plain device memory that is not the pool's."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            joined = self._joined(block_ids, head_start, head_end)
        stream.synchronize()
        return joined

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
        writable = data if data.flags.writeable else data.copy()
        values = torch.from_numpy(writable)
        if not self.snapshots:
            self.scatter_from_device(values, block_ids, head_start, head_end, source_dtype)
            return
        count = sum(i >= 0 for i in snapshot_ids) if per_block_snapshots else len(snapshot_ids)
        with_sequence = sequence_slot >= 0 and not per_block_snapshots
        expected = self.canonical_bytes(len(block_ids), head_start, head_end, source_dtype, with_sequence, count)
        if data.nbytes != expected:
            raise ValueError(f"{data.nbytes} bytes do not fit the canonical form of {len(block_ids)} blocks")
        block_size = self.canonical_bytes(1, head_start, head_end, source_dtype, False)
        stream = self._stream()
        with torch.cuda.stream(stream):
            values = values.to(self._device)
            blocks, start = [], 0
            for i in range(len(block_ids)):
                blocks.append(values[start : start + block_size])
                start += block_size
                if per_block_snapshots and i < len(snapshot_ids) and snapshot_ids[i] >= 0:
                    start = self._write_kept(
                        values, start, self.snapshots, snapshot_ids[i], head_start, head_end, source_dtype
                    )
            if not per_block_snapshots:
                if sequence_slot >= 0:
                    start = self._write_kept(
                        values, start, self.slabs, sequence_slot, head_start, head_end, source_dtype
                    )
                for snapshot_id in snapshot_ids:
                    start = self._write_kept(
                        values, start, self.snapshots, snapshot_id, head_start, head_end, source_dtype
                    )
        stream.synchronize()
        if blocks:
            self.scatter_from_device(torch.cat(blocks), block_ids, head_start, head_end, source_dtype)

    def scatter_from_device(
        self, data: torch.Tensor, block_ids: Sequence[int], head_start: int, head_end: int, source_dtype: str
    ) -> None:
        """Writes canonical bytes that lie in device or host memory; raises ValueError on a wrong size."""
        expected = self.canonical_bytes(len(block_ids), head_start, head_end, source_dtype, False)
        if data.nbytes != expected:
            raise ValueError(f"{data.nbytes} bytes do not fit the canonical form of {len(block_ids)} blocks")
        stream = self._stream()
        with torch.cuda.stream(stream):
            blocks = self._block_numbers(block_ids)
            by_block = data.to(self._device, non_blocking=True).view(len(block_ids), -1)
            start = 0
            for spec in self._paged_groups():
                slab = self._held_heads(spec, head_start, head_end)
                dtype = TORCH_DTYPES[canonical_dtype(spec, source_dtype)]
                size = slab[0].numel() * dtype.itemsize
                values = by_block[:, start : start + size].contiguous().view(dtype)
                rounded = _rounded(values, slab.dtype).view(len(block_ids), *slab.shape[1:])
                if slab.is_contiguous():
                    copy_blocks(_words(slab), _words(rounded), blocks, to_pool=True)
                else:
                    _as_bytes(slab).index_copy_(0, blocks.long(), _as_bytes(rounded))
                start += size
            for follow in self.followers:
                follow(blocks)
        stream.synchronize()

    def gather_into(self, rows: Sequence[np.ndarray], block_ids: Sequence[int], head_start: int, head_end: int) -> None:
        """Fills each row, of page-locked memory, with a block's canonical bytes."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            joined = self._joined(block_ids, head_start, head_end).view(len(block_ids), -1)
            for row, block in zip(rows, joined, strict=True):
                torch.from_numpy(row).copy_(block, non_blocking=True)
        stream.synchronize()

    def scatter_rows(
        self, rows: Sequence[np.ndarray], block_ids: Sequence[int], head_start: int, head_end: int, source_dtype: str
    ) -> None:
        """Writes each row, of page-locked memory, into a block; raises ValueError on a wrong size."""
        with torch.cuda.stream(self._stream()):
            joined = torch.empty((len(rows), rows[0].nbytes), dtype=torch.uint8, device=self._device)
            for row, block in zip(rows, joined, strict=True):
                block.copy_(torch.from_numpy(row), non_blocking=True)
        self.scatter_from_device(joined.view(-1), block_ids, head_start, head_end, source_dtype)

    def clear_blocks(self, block_ids: torch.Tensor) -> None:
        """Zeros blocks on the steps' stream."""
        places = block_ids.to(self._device)
        for spec in self._paged_groups():
            _as_bytes(self.slabs[spec.name]).index_fill_(0, places, 0)

    def empty_on_device(self, size_bytes: int) -> torch.Tensor:
        """Plain device memory for bytes that arrive."""
        with torch.cuda.stream(self._copies):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _stream(self) -> torch.cuda.Stream:
        """The copies' stream, behind the steps that have been started."""
        self.bind_thread()
        if not self.is_idle:
            self._copies.wait_stream(torch.cuda.default_stream(self._device))
        return self._copies

    def _joined(self, block_ids: Sequence[int], head_start: int, head_end: int) -> torch.Tensor:
        """[bytes]: blocks follow each other, groups lie inside a block."""
        if not (block_ids and self._paged_groups()):
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        blocks = self._block_numbers(block_ids)
        parts = []
        for spec in self._paged_groups():
            slab = self._held_heads(spec, head_start, head_end)
            if slab.is_contiguous():
                taken = torch.empty((len(block_ids), *slab.shape[1:]), dtype=slab.dtype, device=self._device)
                copy_blocks(_words(slab), _words(taken), blocks, to_pool=False)
            else:
                taken = _as_bytes(slab).index_select(0, blocks.long()).contiguous()
            parts.append(taken.view(len(block_ids), -1).view(torch.uint8))
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).view(-1)

    def _paged_groups(self) -> list[KVGroupSpec]:
        return [spec for spec in self.groups if not is_per_sequence(spec)]

    def _with_sequence(
        self,
        joined: torch.Tensor,
        num_blocks: int,
        head_start: int,
        head_end: int,
        sequence_slot: int,
        snapshot_ids: Sequence[int],
        per_block_snapshots: bool,
    ) -> torch.Tensor:
        """The canonical bytes with what belongs to a sequence among or after the blocks' bytes."""
        heads = head_start, head_end
        if not per_block_snapshots:
            slots = [] if sequence_slot < 0 else self._kept_bytes(self.slabs, sequence_slot, *heads)
            kept = [piece for i in snapshot_ids for piece in self._kept_bytes(self.snapshots, i, *heads)]
            return torch.cat([joined, *slots, *kept])
        pieces: list[torch.Tensor] = []
        for i, block in enumerate(joined.view(num_blocks, -1) if num_blocks else ()):
            pieces.append(block)
            if i < len(snapshot_ids) and snapshot_ids[i] >= 0:
                pieces += self._kept_bytes(self.snapshots, snapshot_ids[i], *heads)
        return torch.cat(pieces) if pieces else joined

    def _kept_views(
        self, slabs: dict[str, torch.Tensor], index: int, head_start: int, head_end: int
    ) -> list[tuple[KVGroupSpec, torch.Tensor]]:
        """Window and state groups of one slot or snapshot, in declared order."""
        kept = [spec for spec in self.groups if is_per_sequence(spec)]
        return [(spec, self._cut(spec, slabs[spec.name], head_start, head_end)[index]) for spec in kept]

    def _kept_bytes(
        self, slabs: dict[str, torch.Tensor], index: int, head_start: int, head_end: int
    ) -> list[torch.Tensor]:
        views = self._kept_views(slabs, index, head_start, head_end)
        return [view.contiguous().view(-1).view(torch.uint8) for _, view in views]

    def _write_kept(
        self,
        values: torch.Tensor,
        start: int,
        slabs: dict[str, torch.Tensor],
        index: int,
        head_start: int,
        head_end: int,
        source_dtype: str,
    ) -> int:
        """Writes one slot or snapshot from `values` at `start`; returns where it ended."""
        for spec, view in self._kept_views(slabs, index, head_start, head_end):
            dtype = TORCH_DTYPES[canonical_dtype(spec, source_dtype)]
            size = view.numel() * dtype.itemsize
            part = values[start : start + size].clone().view(dtype).view(view.shape)
            view.copy_(_rounded(part, view.dtype))
            start += size
        return start

    def _block_numbers(self, block_ids: Sequence[int]) -> torch.Tensor:
        numbers = torch.tensor(block_ids, dtype=torch.int32, pin_memory=True)
        return numbers.to(self._device, non_blocking=True)

    def _held_heads(self, spec: KVGroupSpec, head_start: int, head_end: int) -> torch.Tensor:
        return self._cut(spec, self.slabs[spec.name], head_start, head_end)

    def _cut(self, spec: KVGroupSpec, slab: torch.Tensor, head_start: int, head_end: int) -> torch.Tensor:
        if not self.head_range[0] <= head_start <= head_end <= self.head_range[1]:
            raise ValueError(f"heads [{head_start}, {head_end}) are outside the rank's {self.head_range}")
        held_start, _ = group_head_range(self.groups, spec, *self.head_range)
        start, end = group_head_range(self.groups, spec, head_start, head_end)
        return slab[..., start - held_start : end - held_start, :]

    def _zeros(self, spec: KVGroupSpec, rows: int) -> torch.Tensor:
        start, end = group_head_range(self.groups, spec, *self.head_range)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.followers = []
        shape = slab_shape(spec, rows, end - start, self.block_size)
        return torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype], device=self._device)


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), -1).view(torch.int64)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """FP8 cannot be indexed as it is."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest number; what is beyond FP8's largest becomes that."""
    if dtype != torch.float8_e4m3fn or values.dtype == dtype:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)


def round_blocks(source: torch.Tensor, target: torch.Tensor, blocks: torch.Tensor) -> None:
    """Rounds blocks of one slab into another of the same shape."""
    places = blocks.long()
    _as_bytes(target).index_copy_(0, places, _as_bytes(_rounded(source.index_select(0, places), target.dtype)))
