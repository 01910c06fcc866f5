"""What transfers and L2 need of a KV pool, whatever its backend."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Pool(Protocol):
    """What transfers need of the KV pool; thread-safe for disjoint blocks."""

    num_blocks: int

    def gather(
        self,
        block_ids: list[int],
        head_start: int,
        head_end: int,
        sequence_slot: int = -1,
        snapshot_ids: list[int] = ...,
        per_block_snapshots: bool = False,
    ) -> Bytes: ...

    def scatter(
        self,
        data: Bytes,
        block_ids: list[int],
        head_start: int,
        head_end: int,
        source_dtype: str,
        sequence_slot: int = -1,
        snapshot_ids: list[int] = ...,
        per_block_snapshots: bool = False,
    ) -> None: ...

    def cut_heads(
        self, data: Bytes, heads: tuple[int, int], part: tuple[int, int], dtype: str, has_snapshot: list[bool]
    ) -> Bytes: ...

    def canonical_bytes(
        self,
        num_blocks: int,
        head_start: int,
        head_end: int,
        dtype: str,
        with_sequence: bool,
        num_snapshots: int = 0,
    ) -> int: ...


@runtime_checkable
class DevicePool(Protocol):
    """A pool whose bytes can stay on its device; device buffers have `__cuda_array_interface__` and `nbytes`."""

    def bind_thread(self) -> None:
        """Lets the calling thread use the device."""

    @property
    def is_idle(self) -> bool:
        """Copies begin at once."""

    def gather_on_device(self, block_ids: list[int], head_start: int, head_end: int) -> Any: ...

    def empty_on_device(self, size_bytes: int) -> Any: ...

    def scatter_from_device(
        self, data: Any, block_ids: list[int], head_start: int, head_end: int, source_dtype: str
    ) -> None: ...


@runtime_checkable
class SlotPool(Protocol):
    """A pool that copies between its blocks and page-locked memory by itself, without a buffer in between."""

    def gather_into(self, rows: Sequence[Bytes], block_ids: Sequence[int], head_start: int, head_end: int) -> None:
        """Fills each row with a block's canonical bytes, values in the pool's own type."""

    def scatter_rows(
        self, rows: Sequence[Bytes], block_ids: Sequence[int], head_start: int, head_end: int, source_dtype: str
    ) -> None:
        """Writes each row into a block; raises ValueError on a wrong size."""
