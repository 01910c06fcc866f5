"""L2 of one rank: host memory beside the pool, in slots of one block and slots of one snapshot, in canonical form.

Which slot holds what is decided by the service, once for all ranks of a domain. Bytes are hashed on their way in and
checked on their way out, so that a slot that was overwritten or damaged can only be a miss. One thread hashes more
slowly than a GPU's link copies, so several do, beside the copies of other parts.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from tidemill_engine.head_cut import HeadRange, paste_heads
from tidemill_engine.kv_groups import KVGroupSpec, canonical_bytes, snapshot_interval_tokens
from tidemill_engine.transfer_pool import Pool, SlotPool
from tidemill_transfer.checksum import checksum64

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger("tidemill.host_pool")

_CHUNK_BYTES = 32 << 20
"""Copies go to the pool in parts of about so many bytes."""
_PIECE_BYTES = 2 << 20
"""Threads hash pieces of about so many bytes."""


def pageable(size_bytes: int) -> Bytes:
    """Ordinary memory; the system gives pages as they are first written."""
    return np.empty(size_bytes, np.uint8)


def pinned(size_bytes: int) -> Bytes:
    """Page-locked memory, which a GPU copies from and to at full speed."""
    import torch

    array: Bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return array


class HostPool:
    """Slots of L2; thread-safe for disjoint slots."""

    def __init__(
        self,
        pool: Pool,
        groups: tuple[KVGroupSpec, ...],
        head_range: tuple[int, int],
        *,
        block_size: int,
        dtype: str,
        memory_bytes: int,
        allocate: Callable[[int], Bytes] = pageable,
        threads: int = 1,
    ) -> None:
        self._pool, self._heads, self._dtype = pool, head_range, dtype
        self._hashers = ThreadPoolExecutor(threads, thread_name_prefix="l2-hash")
        self._groups, self._block_size = groups, block_size
        self.block_bytes = canonical_bytes(groups, block_size, 1, *head_range, dtype)
        self.snapshot_bytes = canonical_bytes(groups, block_size, 0, *head_range, dtype, num_snapshots=1)
        # One snapshot for each interval: as many as the blocks beside them can need.
        interval_blocks = snapshot_interval_tokens(groups) // block_size
        per_unit = max(1, interval_blocks)
        unit_bytes = per_unit * self.block_bytes + (self.snapshot_bytes if interval_blocks else 0)
        units = memory_bytes // unit_bytes
        self.num_blocks, self.num_snapshots = units * per_unit, units if interval_blocks else 0
        self._blocks = allocate(self.num_blocks * self.block_bytes).reshape(self.num_blocks, self.block_bytes)
        self._snapshots = allocate(self.num_snapshots * self.snapshot_bytes).reshape(
            self.num_snapshots, self.snapshot_bytes
        )
        self._block_sums = np.zeros(self.num_blocks, np.uint64)
        self._snapshot_sums = np.zeros(self.num_snapshots, np.uint64)

    def save(
        self,
        block_ids: Sequence[int],
        slots: Sequence[int],
        snapshot_ids: Sequence[int],
        snapshot_slots: Sequence[int],
        before_part: Callable[[], None] = lambda: None,
    ) -> int:
        """Copies pool blocks and their snapshots into slots; returns the bytes. `before_part` raises to end it."""
        total = 0
        hashing: list[Future[None]] = []
        try:
            for start, end in self._chunks(len(block_ids)):
                before_part()
                ids, part = list(block_ids[start:end]), slots[start:end]
                if isinstance(self._pool, SlotPool) and max(snapshot_ids[start:end], default=-1) < 0:
                    self._pool.gather_into([self._blocks[slot] for slot in part], ids, *self._heads)
                    hashing += self._spread(self._note_sums, part)
                    total += len(part) * self.block_bytes
                else:
                    data = self._pool.gather(ids, *self._heads, -1, list(snapshot_ids[start:end]), True)
                    self.write(data, part, snapshot_slots[start:end])
                    total += data.nbytes
        finally:
            wait(hashing)
        for done in hashing:
            done.result()
        return total

    def load(
        self,
        slots: Sequence[int],
        block_ids: Sequence[int],
        snapshot_slots: Sequence[int],
        snapshot_ids: Sequence[int],
        before_part: Callable[[], None] = lambda: None,
    ) -> tuple[int, int]:
        """Copies leading slots that are intact into pool blocks; returns how many, and the bytes. `before_part` raises
        to end it."""
        total, chunks = 0, self._chunks(len(slots))
        checks = [self._check(slots[start:end], snapshot_slots[start:end]) for start, end in chunks]
        try:
            for (start, end), check in zip(chunks, checks, strict=True):
                before_part()
                stop = start + self._num_intact(check, slots[start:end])
                if stop > start:
                    part = slots[start:stop], block_ids[start:stop], snapshot_slots[start:stop]
                    total += self._copy_in(*part, list(snapshot_ids[start:stop]))
                if stop < end:
                    return stop, total
        finally:
            for piece in chain.from_iterable(checks):
                piece.cancel()
        return len(slots), total

    def read(self, slots: Sequence[int], snapshot_slots: Sequence[int]) -> Bytes:
        """The slots' bytes one after the other, each block with its snapshot; ValueError when one is damaged."""
        if self._num_intact(self._check(slots, snapshot_slots), slots) < len(slots):
            raise ValueError("a block of L2 is damaged")
        return self._joined(slots, snapshot_slots)

    def write(
        self, data: Bytes, slots: Sequence[int], snapshot_slots: Sequence[int], heads: HeadRange | None = None
    ) -> None:
        """Fills slots with what `read` of others gave, or of each slot the part of some `heads`."""
        part = heads or self._heads
        block_bytes, snapshot_bytes = self._part_bytes(part, 0), self._part_bytes(part, 1)
        offset = 0
        for slot, snapshot_slot in zip(slots, snapshot_slots, strict=True):
            end = offset + block_bytes
            self._put(data[offset:end], self._blocks, self._block_sums, slot, part)
            if snapshot_slot >= 0:
                offset, end = end, end + snapshot_bytes
                self._put(data[offset:end], self._snapshots, self._snapshot_sums, snapshot_slot, part)
            offset = end
        if offset != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes do not fit {len(slots)} slots")

    def sizes(self, snapshot_slots: Sequence[int]) -> list[int]:
        """Bytes of each block with its snapshot."""
        return [self.block_bytes + (self.snapshot_bytes if slot >= 0 else 0) for slot in snapshot_slots]

    def _part_bytes(self, heads: HeadRange, num_snapshots: int) -> int:
        return canonical_bytes(
            self._groups, self._block_size, 1 - num_snapshots, *heads, self._dtype, num_snapshots=num_snapshots
        )

    def _put(self, data: Bytes, rows: Bytes, sums: npt.NDArray[np.uint64], slot: int, heads: HeadRange) -> None:
        if heads == self._heads:
            rows[slot] = data
            # Of what came, not of what was written: a copy that went wrong shows.
            sums[slot] = checksum64(data)
            return
        of_snapshot = rows is self._snapshots
        paste_heads(
            rows[slot], data, self._groups, self._block_size, self._heads, heads, self._dtype, of_snapshot=of_snapshot
        )
        # Of what is there by now; it is right once the last part is.
        sums[slot] = checksum64(rows[slot])

    def _copy_in(
        self, slots: Sequence[int], block_ids: Sequence[int], snapshot_slots: Sequence[int], snapshot_ids: list[int]
    ) -> int:
        """Into the pool's blocks; returns the bytes."""
        ids = list(block_ids)
        if isinstance(self._pool, SlotPool) and max(snapshot_slots, default=-1) < 0:
            self._pool.scatter_rows([self._blocks[slot] for slot in slots], ids, *self._heads, self._dtype)
            return len(slots) * self.block_bytes
        data = self._joined(slots, snapshot_slots)
        self._pool.scatter(data, ids, *self._heads, self._dtype, -1, snapshot_ids, True)
        return data.nbytes

    def _note_sums(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._block_sums[slot] = checksum64(self._blocks[slot])

    def _check(self, slots: Sequence[int], snapshot_slots: Sequence[int]) -> list[Future[list[bool]]]:
        """Starts to compare the slots with their sums."""
        return self._spread(self._are_intact, list(zip(slots, snapshot_slots, strict=True)))

    def _are_intact(self, slots: Sequence[tuple[int, int]]) -> list[bool]:
        return [
            checksum64(self._blocks[slot]) == int(self._block_sums[slot])
            and (snapshot < 0 or checksum64(self._snapshots[snapshot]) == int(self._snapshot_sums[snapshot]))
            for slot, snapshot in slots
        ]

    def _num_intact(self, check: list[Future[list[bool]]], slots: Sequence[int]) -> int:
        """Leading slots that are as they were written; waits for no more of the check than that needs."""
        intact = chain.from_iterable(piece.result() for piece in check)
        for index, (slot, good) in enumerate(zip(slots, intact, strict=True)):
            if not good:
                log.error("host_block_damaged", slot=slot)
                return index
        return len(slots)

    def _spread(self, work: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[Future[R]]:
        """Gives pieces of the items, one for each block, to the threads."""
        size = max(1, _PIECE_BYTES // max(1, self.block_bytes))
        return [self._hashers.submit(work, items[start : start + size]) for start in range(0, len(items), size)]

    def _joined(self, slots: Sequence[int], snapshot_slots: Sequence[int]) -> Bytes:
        parts = []
        for slot, snapshot_slot in zip(slots, snapshot_slots, strict=True):
            parts.append(self._blocks[slot])
            if snapshot_slot >= 0:
                parts.append(self._snapshots[snapshot_slot])
        return np.concatenate(parts)

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        size = max(1, _CHUNK_BYTES // (self.block_bytes + self.snapshot_bytes))
        return [(start, min(count, start + size)) for start in range(0, count, size)]
