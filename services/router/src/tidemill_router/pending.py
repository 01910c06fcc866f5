"""Prefixes that placements under way will leave in a target's cache, so that what is shared is computed once."""

from collections import Counter
from collections.abc import Sequence

from tidemill_kvcache.domain_track import Holder


class PendingPrefixes:
    """Block hashes of live reservations by target, counted."""

    def __init__(self) -> None:
        self._counts: dict[Holder, Counter[bytes]] = {}

    def __len__(self) -> int:
        return sum(len(counts) for counts in self._counts.values())

    def add(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        """A prompt is on its way to a target."""
        if hashes:
            self._counts.setdefault(holder, Counter()).update(hashes)

    def remove(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        """It has arrived, or will not."""
        counts = self._counts.get(holder)
        if counts is None:
            return
        for block_hash in hashes:
            counts[block_hash] -= 1
            if counts[block_hash] <= 0:
                del counts[block_hash]
        if not counts:
            del self._counts[holder]

    def depth(self, holder: Holder, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that are pending at a target."""
        counts = self._counts.get(holder)
        if counts is None:
            return 0
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in counts:
                low = middle
            else:
                high = middle - 1
        return low
