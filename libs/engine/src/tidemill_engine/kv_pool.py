"""The KV of one rank: one block-major slab for each KV group, sequence slots and snapshots.

Pool layout (private to this file and the attention backends)
  paged   [num_blocks + 1, layers, planes, rows, heads, dim]    the last block is the null block: always zeros
  window  [slots, layers, planes, window_tokens, heads, dim]    position p lives at p % window_tokens
  state   [slots, layers, heads, values]                        always float32
`planes` is 2 for K and V, 1 where one vector is both; `rows` is block_size, or a part of it in a compressed stream.
Window and state groups have the same layout once more with snapshots in place of slots.

Canonical form (on the wire and in L3), what `gather` makes and `scatter` takes: little-endian bytes without padding,
  for each block: for each paged group in declared order: [layers, planes, rows, heads, dim]
     per_block_snapshots: then the block's snapshot, where it has one
  else after all blocks: the sequence slot, then each snapshot.
A sequence slot or snapshot is, for each window or state group in declared order, [layers, planes, window_tokens, heads,
dim] or [layers, heads, values]. `heads` is the asked head range (`kv_groups.group_head_range`), whatever range the rank
holds; paged and window values have the sender's KV dtype, state values are float32.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tidemill_engine.head_cut import cut_heads
from tidemill_engine.kv_groups import (
    KVGroupSpec,
    canonical_bytes,
    canonical_dtype,
    group_head_range,
    is_per_sequence,
    num_model_heads,
)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_STORAGE = {"float32": np.float32, "bfloat16": np.uint16}


class KVPool:
    """Thread-safe for disjoint blocks, slots and snapshots."""

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        *,
        block_size: int,
        num_blocks: int,
        num_slots: int,
        num_snapshots: int,
        head_range: tuple[int, int] | None = None,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.head_range = head_range or (0, num_model_heads(groups))
        self.null_block = num_blocks
        self.slabs: dict[str, torch.Tensor] = {}
        self.snapshots: dict[str, torch.Tensor] = {}
        for spec in groups:
            rows = num_slots if is_per_sequence(spec) else num_blocks + 1
            self.slabs[spec.name] = self._zeros(spec, rows)
            if is_per_sequence(spec):
                self.snapshots[spec.name] = self._zeros(spec, num_snapshots)

    def layer(self, group: str, index: int) -> torch.Tensor:
        """In-place view of one layer of a group: the slab without its layer axis."""
        return self.slabs[group][:, index]

    def clear_blocks(self, block_ids: torch.Tensor) -> None:
        """Zeros blocks that a step begins to fill, so that the unwritten end of a block is never NaN."""
        for spec in self.groups:
            if not is_per_sequence(spec):
                self.slabs[spec.name].index_fill_(0, block_ids, 0)

    def reset_slot(self, slot: int) -> None:
        """A sequence without tokens."""
        for name in self.snapshots:
            self.slabs[name][slot].zero_()

    def save_snapshot(self, slot: int, snapshot_id: int) -> None:
        for name, snapshots in self.snapshots.items():
            snapshots[snapshot_id].copy_(self.slabs[name][slot])

    def restore_snapshot(self, slot: int, snapshot_id: int) -> None:
        for name, snapshots in self.snapshots.items():
            self.slabs[name][slot].copy_(snapshots[snapshot_id])

    def canonical_bytes(
        self,
        num_blocks: int,
        head_start: int,
        head_end: int,
        dtype: str,
        with_sequence: bool,
        num_snapshots: int = 0,
    ) -> int:
        """Size of a piece in canonical form."""
        return canonical_bytes(
            self.groups,
            self.block_size,
            num_blocks,
            head_start,
            head_end,
            dtype,
            with_sequence=with_sequence,
            num_snapshots=num_snapshots,
        )

    def cut_heads(
        self,
        data: np.ndarray,
        heads: tuple[int, int],
        part: tuple[int, int],
        dtype: str,
        has_snapshot: Sequence[bool],
    ) -> np.ndarray:
        """Canonical bytes of some of the heads of blocks that have more; see head_cut."""
        return cut_heads(data, self.groups, self.block_size, heads, part, dtype, has_snapshot)

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
        views = list(self._views(block_ids, head_start, head_end, sequence_slot, snapshot_ids, per_block_snapshots))
        out = np.empty(sum(view.nbytes for _, view in views), np.uint8)
        offset = 0
        for _, view in views:
            out[offset : offset + view.nbytes].view(view.dtype).reshape(view.shape)[...] = view
            offset += view.nbytes
        return out

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
        """Writes canonical bytes with paged and window values in `source_dtype`; raises ValueError on a wrong size."""
        places = list(self._views(block_ids, head_start, head_end, sequence_slot, snapshot_ids, per_block_snapshots))
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        offset = 0
        for spec, view in places:
            dtype = canonical_dtype(spec, source_dtype)
            size = view.size * np.dtype(_STORAGE[dtype]).itemsize
            if offset + size > data.nbytes:
                break
            values = data[offset : offset + size].view(_STORAGE[dtype]).reshape(view.shape)
            pieces.append((view, values))
            offset += size
        if len(pieces) != len(places) or offset != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes do not fit the canonical form of {len(block_ids)} blocks")
        for view, values in pieces:
            _copy_converted(view, values)

    def _views(
        self,
        block_ids: Sequence[int],
        head_start: int,
        head_end: int,
        sequence_slot: int,
        snapshot_ids: Sequence[int],
        per_block_snapshots: bool,
    ) -> Iterator[tuple[KVGroupSpec, np.ndarray]]:
        """Pool memory in the order of the canonical form."""
        paged = [
            (s, self._heads(s, self.slabs[s.name], head_start, head_end)) for s in self.groups if s.kind == "paged"
        ]
        kept = [s for s in self.groups if is_per_sequence(s)]
        snapshots = [(s, self._heads(s, self.snapshots[s.name], head_start, head_end)) for s in kept]
        for i, block_id in enumerate(block_ids):
            yield from ((spec, slab[block_id]) for spec, slab in paged)
            if per_block_snapshots and i < len(snapshot_ids) and snapshot_ids[i] >= 0:
                yield from ((spec, slab[snapshot_ids[i]]) for spec, slab in snapshots)
        if per_block_snapshots:
            return
        if sequence_slot >= 0:
            slots = [(s, self._heads(s, self.slabs[s.name], head_start, head_end)) for s in kept]
            yield from ((spec, slab[sequence_slot]) for spec, slab in slots)
        for snapshot_id in snapshot_ids:
            yield from ((spec, slab[snapshot_id]) for spec, slab in snapshots)

    def _heads(self, spec: KVGroupSpec, slab: torch.Tensor, head_start: int, head_end: int) -> np.ndarray:
        """Numpy view of a slab, cut to the asked heads."""
        if not self.head_range[0] <= head_start <= head_end <= self.head_range[1]:
            raise ValueError(f"heads [{head_start}, {head_end}) are outside the rank's {self.head_range}")
        held_start, _ = group_head_range(self.groups, spec, *self.head_range)
        start, end = group_head_range(self.groups, spec, head_start, head_end)
        array = (slab.view(torch.uint16) if slab.dtype == torch.bfloat16 else slab).numpy()
        # Heads are the axis before the last in every layout.
        return array[..., start - held_start : end - held_start, :]

    def _zeros(self, spec: KVGroupSpec, rows: int) -> torch.Tensor:
        start, end = group_head_range(self.groups, spec, *self.head_range)
        return torch.zeros(slab_shape(spec, rows, end - start, self.block_size), dtype=TORCH_DTYPES[spec.dtype])


def slab_shape(spec: KVGroupSpec, rows: int, heads: int, block_size: int) -> tuple[int, ...]:
    """Shape of a group's slab with `rows` blocks, slots or snapshots."""
    layers = len(spec.layers)
    if spec.kind == "state":
        return (rows, layers, heads, spec.head_values)
    tokens = block_size // spec.tokens_per_row if spec.kind == "paged" else spec.window_tokens
    return (rows, layers, spec.planes, tokens, heads, spec.head_values // spec.planes)


def block_bytes(groups: tuple[KVGroupSpec, ...], block_size: int, tp_size: int) -> int:
    """Pool bytes of one block on one rank."""
    total = 0
    for spec in groups:
        if spec.kind == "paged":
            heads = spec.num_heads // tp_size if spec.sharded else spec.num_heads
            values = len(spec.layers) * (block_size // spec.tokens_per_row) * heads * spec.head_values
            total += values * TORCH_DTYPES[spec.dtype].itemsize
    return total


def _copy_converted(view: np.ndarray, values: np.ndarray) -> None:
    if view.dtype == values.dtype:
        view[...] = values
    elif view.dtype == np.float32:
        view.view(np.uint32)[...] = values.astype(np.uint32) << 16
    else:
        rounded = torch.from_numpy(values.copy()).to(torch.bfloat16)
        view[...] = rounded.view(torch.uint16).numpy()
