"""Runs whose parent block is not known, because its event was lost or the index has forgotten it."""

from collections.abc import Iterator

from tidemill_kvcache.hashing import HASH_BYTES

ORPHAN_BYTES = 640
"""Upper bound of what a run takes here: entries, a set, and the hash."""


class Orphans:
    """Top runs that are no prompt's first one, by the hash that they wait for."""

    def __init__(self) -> None:
        self.missing_of: dict[int, bytes] = {}
        """The hash that each run waits for."""
        self._waiting: dict[bytes, set[int]] = {}

    @property
    def bytes_used(self) -> int:
        """Memory of all entries (an upper bound)."""
        return len(self.missing_of) * ORPHAN_BYTES

    def __len__(self) -> int:
        return len(self.missing_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self.missing_of)

    def __contains__(self, run: int) -> bool:
        return run in self.missing_of

    def missing(self, run: int) -> bytes:
        """The parent hash that a run waits for; empty: none."""
        return self.missing_of.get(run, b"")

    def add(self, run: int, missing: bytes) -> None:
        """A run waits for a block."""
        self.missing_of[run] = missing
        self._waiting.setdefault(missing, set()).add(run)

    def remove(self, run: int) -> None:
        """A run ended, or has its parent; one that does not wait is ignored."""
        missing = self.missing_of.pop(run, None)
        if missing is None:
            return
        self._waiting[missing].discard(run)
        if not self._waiting[missing]:
            del self._waiting[missing]

    def pass_on(self, run: int, heir: int) -> None:
        """Another run has taken the place of this one, if it waits."""
        if run in self.missing_of:
            missing = self.missing_of[run]
            self.remove(run)
            self.add(heir, missing)

    def next_awaited(self, packed: bytes, at: int) -> int:
        """End of the part from block `at` on that ends with the next block that is waited for; else of all."""
        total = len(packed) // HASH_BYTES
        if self._waiting:
            for end in range(at + 1, total + 1):
                if packed[(end - 1) * HASH_BYTES : end * HASH_BYTES] in self._waiting:
                    return end
        return total

    def take(self, block_hash: bytes) -> set[int]:
        """The runs that waited for a block, which is there now."""
        found = self._waiting.pop(block_hash, set())
        for run in found:
            del self.missing_of[run]
        return found
