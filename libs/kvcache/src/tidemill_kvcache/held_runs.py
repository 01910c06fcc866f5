"""Who holds which part of one prompt, as the index has it, and how far the prompt goes with some of them. Pure.

Depths are in blocks. Holders are given as bits (see BlockIndex.bits).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class HeldRuns(NamedTuple):
    """Stretches of a prompt from its first block on, each held by the same holders."""

    ends: Sequence[int]
    """Depth at which each ends."""
    masks: Sequence[int]
    """Who holds all of it."""

    def held_from(self, first: int, bits: int) -> int:
        """Depth to which each block after the first ones has one of these holders; `first`: not even the next."""
        depth = first
        for at in range(bisect_right(self.ends, first), len(self.ends)):
            if not self.masks[at] & bits:
                break
            depth = self.ends[at]
        return depth

    def last_within(self, first: int, most: int, bits: int) -> int:
        """The deepest block of (first, most] that has one of these holders, as its depth; `first`: there is none."""
        at = min(bisect_right(self.ends, most - 1), len(self.ends) - 1)
        while at >= 0 and self.ends[at] > first:
            if self.masks[at] & bits:
                return min(self.ends[at], most)
            at -= 1
        return first
