"""Runs by the hash of their first block: open addressing over a column of run ids, 4 bytes an entry.

A hash is uniform already, so its upper bits are its place; the hash itself lies in the arena. A removed entry leaves no
hole: those behind it move up.
"""

from array import array

import numpy as np

from tidemill_kvcache.arena import HashArena
from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_kvcache.run_table import RunTable

MIN_PLACES = 256
MAX_LOAD = 0.67
GROWTH = 1.5
MIN_LOAD = 0.2
"""A table that is emptier is made smaller."""


class HeadTable:
    """Ids of the runs in `runs`, each added under its present first hash."""

    def __init__(self, arena: HashArena, runs: RunTable) -> None:
        self._arena = arena
        self._runs = runs
        self._entries = array("I", bytes(4 * MIN_PLACES))
        self._places = MIN_PLACES
        self._count = 0

    @property
    def bytes_used(self) -> int:
        """Memory of the entries."""
        return 4 * self._places

    def __len__(self) -> int:
        return self._count

    def find(self, block_hash: bytes) -> int:
        """The run that begins with this block; 0: none does."""
        entries, starts, stored = self._entries, self._runs.starts, self._arena.stored
        place = (int.from_bytes(block_hash[4:8], "little") * self._places) >> 32
        while run := entries[place]:
            at = starts[run] * HASH_BYTES
            if stored[at : at + HASH_BYTES] == block_hash:
                return run
            place += 1
            if place == self._places:
                place = 0
        return 0

    def add(self, run: int) -> None:
        """A run whose first hash begins no other."""
        if self._count >= MAX_LOAD * self._places:
            self._resize(int(GROWTH * self._places))
        entries, place = self._entries, self._home(run)
        while entries[place]:
            place = place + 1 if place + 1 < self._places else 0
        entries[place] = run
        self._count += 1

    def replace(self, run: int, other: int) -> None:
        """The first hash of `run` is from now on that of `other`."""
        self._entries[self._place(run)] = other

    def remove(self, run: int) -> None:
        """The run's first hash begins none any more."""
        entries, places = self._entries, self._places
        hole = at = self._place(run)
        while True:
            at = at + 1 if at + 1 < places else 0
            other = entries[at]
            if not other:
                break
            if (at - self._home(other)) % places >= (at - hole) % places:
                entries[hole], hole = other, at
        entries[hole] = 0
        self._count -= 1
        if places > MIN_PLACES and self._count < MIN_LOAD * places:
            self._resize(max(MIN_PLACES, places // 2))

    def check_invariants(self) -> None:
        """Each run can be found (O(n), for tests)."""
        listed = [run for run in self._entries if run]
        assert len(listed) == self._count, "entries are not counted"
        for run in listed:
            assert self.find(self._arena.hash_at(self._runs.starts[run])) == run, "a run cannot be found"

    def _home(self, run: int) -> int:
        head = self._arena.hash_at(self._runs.starts[run])
        return (int.from_bytes(head[4:8], "little") * self._places) >> 32

    def _place(self, run: int) -> int:
        entries, place = self._entries, self._home(run)
        while entries[place] != run:
            assert entries[place], "the run is not in the table"
            place = place + 1 if place + 1 < self._places else 0
        return place

    def _resize(self, places: int) -> None:
        """All runs into a new table: in order of their first place each takes the next one that is free."""
        runs = np.frombuffer(self._entries, np.uint32)
        runs = runs[runs != 0]
        firsts = np.frombuffer(self._runs.starts, np.uint32).take(runs).astype(np.intp)
        words = self._arena.words.ravel().take(2 * firsts)
        # A run's first place above its id, so that one sort puts them in order.
        keys = (words >> np.uint64(32)) * np.uint64(places) & np.uint64(0xFFFFFFFF00000000) | runs
        keys.sort()
        runs, ramp = keys.astype(np.uint32), np.arange(len(keys))
        taken = np.maximum.accumulate((keys >> np.uint64(32)).astype(np.intp) - ramp) + ramp
        entries = np.zeros(places, np.uint32)
        inside = int(taken.searchsorted(places))
        entries[taken[:inside]] = runs[:inside]
        # What is pushed over the end goes on at the beginning.
        pushed = runs[inside:]
        entries[np.flatnonzero(entries == 0)[: len(pushed)]] = pushed
        self._entries, self._places = array("I", entries.tobytes()), places
