"""Block hashes of an index in one growing piece of memory: 16 bytes a slot, and the run that owns it.

Slots are handed out in order within segments of equal size. A freed slot is not used again by itself: a segment whose
slots are all free is, and the emptiest segment can be vacated by moving what lives there. So memory follows content.
"""

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill_kvcache.hashing import HASH_BYTES

SLOT_BYTES = HASH_BYTES + 4
HUGE_PAGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 4 << 20
"""A mapping that outgrows this asks for huge pages: a fault for each small one costs more than filling it.

The last huge page may be filled in part only.
"""
MAX_SEGMENT_SLOTS = 16384
MIN_SEGMENT_SLOTS = 256

Words = npt.NDArray[np.uint64]


class HashArena:
    """`words` is uint64 [slots, 2], a hash as two little-endian halves; `owners` is uint32 [slots], 0: free."""

    stored: mmap.mmap
    """The hashes as bytes."""
    words: Words
    owners: npt.NDArray[np.uint32]

    def __init__(self, segment_slots: int) -> None:
        assert segment_slots & (segment_slots - 1) == 0, "a segment's size is a power of two"
        self.segment_slots = segment_slots
        self.live_slots = 0
        self._live: list[int] = []
        self._free_segments: list[int] = []
        self._head = -1
        self._fill = segment_slots
        self.stored = _anonymous(segment_slots * HASH_BYTES)
        self._owner_bytes = _anonymous(segment_slots * 4)
        self._map()

    @property
    def bytes_used(self) -> int:
        """Memory of the slots (an upper bound)."""
        huge = sum(HUGE_PAGE_BYTES for size in (HASH_BYTES, 4) if self.top * size > HUGE_FROM_BYTES)
        return self.used_slots * SLOT_BYTES + huge

    @property
    def top(self) -> int:
        """End of the segments that were ever used."""
        return len(self._live) * self.segment_slots

    @property
    def used_slots(self) -> int:
        """Slots of segments in use, live or not; what the head segment has left is not used yet."""
        segments = len(self._live) - len(self._free_segments)
        return segments * self.segment_slots - (self.segment_slots - self._fill if segments else 0)

    @property
    def dead_slots(self) -> int:
        """Used slots that hold nothing."""
        return self.used_slots - self.live_slots

    def hash_at(self, slot: int) -> bytes:
        """One hash."""
        return self.stored[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]

    def packed(self, start: int, count: int) -> bytes:
        """The hashes of consecutive slots, one after the other."""
        return self.stored[start * HASH_BYTES : (start + count) * HASH_BYTES]

    def room(self, count: int, least: int = MIN_SEGMENT_SLOTS // 4) -> int:
        """How many of `count` consecutive slots can be reserved; opens a segment rather than give less than `least`."""
        left = self.segment_slots - self._fill
        if left < min(count, least):
            self._open_segment()
            left = self.segment_slots
        return min(count, left)

    def reserve(self, count: int) -> int:
        """The first of `count` consecutive slots, at most what `room` said; they stay free until `fill`."""
        assert count <= self.segment_slots - self._fill, "more slots than the segment has"
        start = self._head * self.segment_slots + self._fill
        self._fill += count
        return start

    def reserve_behind(self, slot: int, count: int) -> int:
        """Reserves at most `count` slots from `slot` on if that is where the next ones would lie; returns how many."""
        if slot != self._head * self.segment_slots + self._fill:
            return 0
        count = min(count, self.segment_slots - self._fill)
        self._fill += count
        return count

    def fill(self, start: int, packed: bytes | memoryview, owner: int) -> int:
        """Writes hashes into reserved slots; returns the slot behind them."""
        at, size = start * HASH_BYTES, len(packed)
        count = size // HASH_BYTES
        end = start + count
        self.stored[at : at + size] = packed
        if count == 1:
            self.owners[start] = owner
        else:
            self.owners[start:end] = owner
        self._live[start // self.segment_slots] += count
        self.live_slots += count
        return end

    def free(self, start: int, count: int) -> None:
        """Slots of one segment hold nothing any more."""
        segment = start // self.segment_slots
        self.owners[start : start + count] = 0
        self.live_slots -= count
        self._live[segment] -= count
        if self._live[segment] == 0 and segment != self._head:
            self._free_segments.append(segment)

    def emptiest_segment(self) -> tuple[int, int] | None:
        """(first, end) slot of the segment in use, other than the head, with the fewest live slots."""
        free = set(self._free_segments)
        candidates = [(live, s) for s, live in enumerate(self._live) if s != self._head and s not in free]
        if not candidates:
            return None
        _, segment = min(candidates)
        return segment * self.segment_slots, (segment + 1) * self.segment_slots

    def _open_segment(self) -> None:
        emptied = self._head if self._head >= 0 and self._live[self._head] == 0 else -1
        if self._free_segments:
            self._head = self._free_segments.pop()
        else:
            self._live.append(0)
            self._head = len(self._live) - 1
            self._grow()
        if emptied >= 0:
            self._free_segments.append(emptied)
        self._fill = 0

    def _grow(self) -> None:
        """Doubles the mappings when the segments outgrow them; the pages of what is not used yet cost nothing."""
        if self.top <= len(self.owners):
            return
        slots = 2 * len(self.owners)
        self.words = self.owners = None  # type: ignore[assignment]
        self.stored = _resized(self.stored, slots * HASH_BYTES)
        self._owner_bytes = _resized(self._owner_bytes, slots * 4)
        self._map()

    def _map(self) -> None:
        self.words = as_words(self.stored)
        self.owners = np.frombuffer(self._owner_bytes, np.uint32)


def as_words(packed: Any) -> Words:
    """Packed hashes as uint64 [n, 2], without a copy."""
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


def _resized(mapping: mmap.mmap, size: int) -> mmap.mmap:
    try:
        mapping.resize(size)
    except BufferError:
        # Somebody, a traceback perhaps, still has a view of it.
        larger = _anonymous(size)
        larger[: len(mapping)] = mapping[:]
        mapping = larger
    if size > HUGE_FROM_BYTES:
        # For all of it: a mapping that is advised in part can no longer be resized.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _anonymous(size: int) -> mmap.mmap:
    # Private, because a shared anonymous mapping cannot grow.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
