"""Runs of block hashes and the slots they lie in: found by hash, moved so that memory follows content.

New blocks are made findable by hash in large batches, which costs a fraction of doing it at once; until then only the
last block of each write is known, which is the one that the next event names as its parent.
"""

import numpy as np

from tidemill_kvcache.arena import SLOT_BYTES, HashArena, as_words
from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_kvcache.head_table import HeadTable
from tidemill_kvcache.run_table import RunTable
from tidemill_kvcache.slot_table import KEY_BYTES, SlotTable

MAX_PENDING_SEGMENTS = 2
MAX_PENDING_WRITES = 512
PENDING_BYTES = 224
"""Upper bound of what a write takes until it is findable."""
MIN_EVICTED_STRETCH = 4
"""Removed blocks that follow each other in shorter stretches are looked up all at once."""


class RunStore:
    """Runs by id, which `arena.owners` names for each slot."""

    def __init__(self, segment_slots: int) -> None:
        self.arena = HashArena(segment_slots)
        self.runs = RunTable()
        self.heads = HeadTable(self.arena, self.runs)
        self.table = SlotTable(self.arena)
        self._pending: list[int] = []
        self._pending_ends: list[int] = []
        self._num_pending = 0
        self._max_pending = MAX_PENDING_SEGMENTS * segment_slots
        self.tails: dict[bytes, int] = {}
        """Runs by the last block of what is pending; a run may have changed since."""

    @property
    def bytes_used(self) -> int:
        """Memory of everything (an upper bound)."""
        return (
            self.arena.bytes_used
            + self.table.bytes_used
            + self.runs.bytes_used
            + self.heads.bytes_used
            + len(self.tails) * PENDING_BYTES
        )

    @property
    def dead_bytes(self) -> int:
        """What of that holds nothing any more, and can be had back by vacating and sweeping."""
        dead_keys = max(0, self.table.size - self.arena.live_slots)
        return self.arena.dead_slots * SLOT_BYTES + dead_keys * KEY_BYTES

    def at(self, slot: int) -> int:
        """The run that a slot belongs to; 0: none."""
        return self.arena.owners.item(slot)

    def own(self, run: int, start: int, count: int) -> None:
        """Gives another run's slots to this one."""
        self.arena.owners[start : start + count] = run

    def end(self, run: int) -> int:
        """The slot after the run's last one."""
        return self.runs.starts[run] + self.runs.lengths[run]

    def hashes(self, run: int) -> bytes:
        """The run's hashes, packed."""
        return self.arena.packed(self.runs.starts[run], self.runs.lengths[run])

    def head(self, run: int) -> bytes:
        """The run's first hash."""
        return self.arena.hash_at(self.runs.starts[run])

    def tail(self, run: int) -> bytes:
        """The run's last hash."""
        return self.arena.hash_at(self.runs.starts[run] + self.runs.lengths[run] - 1)

    def write(self, run: int, start: int, packed: bytes | memoryview) -> None:
        """Puts hashes into slots that are reserved for the run."""
        ends, end = self._pending_ends, self.arena.fill(start, packed, run)
        if ends and ends[-1] == start:
            ends[-1] = end
        else:
            self._pending.append(start)
            ends.append(end)
        self._num_pending += end - start
        tails = self.tails
        tails[bytes(packed[-HASH_BYTES:])] = run
        if self._num_pending > self._max_pending or len(tails) > MAX_PENDING_WRITES:
            self.flush()

    def relocate(self, run: int, spare: int) -> None:
        """Copies a run to where the arena grows, with slots to spare behind it as far as the segment has them."""
        runs = self.runs
        packed, old, length = self.hashes(run), runs.starts[run], runs.lengths[run]
        room = self.arena.room(length + spare, least=length)
        start = self.arena.reserve(room)
        runs.rooms[run] = room - length
        self.write(run, start, packed)
        runs.starts[run] = start
        self.arena.free(old, length)

    def locate(self, block_hash: bytes) -> tuple[int, int]:
        """(run, place in it) of a block; run 0: it is not there."""
        run, runs = self.tails.get(block_hash, 0), self.runs
        if run and runs.lengths[run] and self.tail(run) == block_hash:
            return run, runs.lengths[run] - 1
        slot = self.table.find(block_hash)
        if slot < 0 and self._num_pending:
            self.flush()
            slot = self.table.find(block_hash)
        if slot < 0:
            return 0, 0
        owner = self.at(slot)
        return owner, slot - runs.starts[owner]

    def stretches(self, packed: bytes) -> list[tuple[int, int]]:
        """(first slot, end) of those of the hashes that are known, joined where slots are consecutive."""
        found, done = self._evicted_stretches(packed)
        rest = packed[done * HASH_BYTES :]
        if not rest:
            return found
        self.flush()
        slots = np.unique(self.table.find_all(as_words(rest)))
        slots = slots[slots >= 0]
        if slots.size:
            breaks = np.flatnonzero(np.diff(slots) != 1) + 1
            firsts = slots[np.concatenate(([0], breaks))]
            lasts = slots[np.concatenate((breaks - 1, [slots.size - 1]))]
            found += zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)
        return found

    def _evicted_stretches(self, packed: bytes) -> tuple[list[tuple[int, int]], int]:
        """The same for hashes in the order of eviction, each chain's deepest block first; and how many that were."""
        total, done = len(packed) // HASH_BYTES, 0
        backwards = as_words(packed)[::-1].tobytes()
        found: list[tuple[int, int]] = []
        while done < total and len(found) <= 1 + done // MIN_EVICTED_STRETCH:
            run, place = self.locate(packed[done * HASH_BYTES : (done + 1) * HASH_BYTES])
            if not run:
                break
            end = self.runs.starts[run] + place + 1
            low, high = 1, min(place + 1, total - done)
            middle = high
            while low < high:
                first = (total - done - middle) * HASH_BYTES
                if self.arena.packed(end - middle, middle) == backwards[first : first + middle * HASH_BYTES]:
                    low = middle
                else:
                    high = middle - 1
                middle = (low + high + 1) // 2
            found.append((end - low, end))
            done += low
        return found, done

    def flush(self) -> None:
        """Makes all blocks findable by hash."""
        if not self._num_pending:
            return
        starts, ends = self._pending, self._pending_ends
        self._pending, self._pending_ends = [], []
        self.tails.clear()
        self._num_pending = 0
        self.table.insert(starts, ends)

    def vacate(self) -> bool:
        """Moves what lives in the emptiest segment elsewhere; False: there is no such segment."""
        segment = self.arena.emptiest_segment()
        if segment is None:
            return False
        self.flush()
        for owner in np.unique(self.arena.owners[segment[0] : segment[1]]).tolist():
            if owner:
                self.relocate(owner, spare=0)
        return True

    def take_in(self) -> None:
        """Vacates one segment when a third of the used slots hold nothing: a bounded piece of cleaning."""
        arena = self.arena
        if arena.dead_slots * 3 > arena.used_slots + 3 * arena.segment_slots:
            self.vacate()

    def check_invariants(self) -> None:
        """Slots, owners and tables agree (O(n), for tests)."""
        self.flush()
        self.table.check_invariants()
        self.heads.check_invariants()
        arena, runs = self.arena, self.runs
        assert runs.live == sum(1 for _ in runs), "a run is not counted"
        for run in runs:
            start, end = runs.starts[run], self.end(run)
            assert (arena.owners[start:end] == run).all(), "a slot has another owner"
            assert not arena.owners[end : end + runs.rooms[run]].any(), "reserved slots are in use"
            for slot in range(start, end):
                assert self.table.find(arena.hash_at(slot)) == slot, "a block cannot be found"
        assert arena.live_slots == sum(runs.lengths), "slots are lost"
