"""The runs of an index as columns of numbers: a run is a row, and no Python object belongs to it."""

from array import array
from collections.abc import Iterator

from tidemill_kvcache.holder_sets import HolderSets

ROW_BYTES = 25
"""23 of the columns, and what arrays take in advance when they grow."""


class RunTable:
    """Run ids from 1 on; row 0 means no run. A free row has length 0."""

    def __init__(self) -> None:
        self.starts = array("I", [0])
        """First slot in the arena."""
        self.lengths = array("I", [0])
        """Blocks."""
        self.rooms = array("H", [0])
        """Slots reserved behind the run."""
        self.parents = array("I", [0])
        """The run before it in the chain; of a free row, the next free one."""
        self.children = array("I", [0])
        """How many runs have this one as parent."""
        self.used = bytearray(1)
        """1: spared by the next round of eviction."""
        self.sets = HolderSets()
        self.live = 0
        self.masks = array("I", [0])
        """Who holds the run, as a number in `sets`."""
        self._free = 0

    @property
    def bytes_used(self) -> int:
        """Memory of the columns (an upper bound)."""
        return len(self.starts) * ROW_BYTES + self.sets.bytes_used

    def __len__(self) -> int:
        """Rows, free ones among them."""
        return len(self.starts)

    def add(self, start: int, length: int, parent: int, mask: int) -> int:
        """A new run."""
        self.live += 1
        held_by, run = self.sets.take(mask), self._free
        if run:
            self._free = self.parents[run]
            self.starts[run], self.lengths[run], self.parents[run], self.masks[run] = start, length, parent, held_by
            return run
        self.starts.append(start)
        self.lengths.append(length)
        self.rooms.append(0)
        self.parents.append(parent)
        self.children.append(0)
        self.used.append(0)
        self.masks.append(held_by)
        return len(self.starts) - 1

    def remove(self, run: int) -> None:
        """The row may be given to another run."""
        self.live -= 1
        self.sets.give(self.masks[run])
        self.lengths[run] = self.rooms[run] = self.children[run] = self.used[run] = self.masks[run] = 0
        self.parents[run], self._free = self._free, run

    def mask(self, run: int) -> int:
        """Who holds the run."""
        return self.sets.masks[self.masks[run]]

    def same_mask(self, run: int, other: int) -> bool:
        """Both runs have the same holders."""
        return self.masks[run] == self.masks[other]

    def set_mask(self, run: int, mask: int) -> None:
        """Others hold the run now."""
        old, self.masks[run] = self.masks[run], self.sets.take(mask)
        self.sets.give(old)

    def held_by(self, bits: int) -> list[int]:
        """Runs that any of these holders has."""
        wanted = self.sets.meeting(bits)
        return [run for run, held_by in enumerate(self.masks) if held_by in wanted] if wanted else []

    def __iter__(self) -> Iterator[int]:
        """Live runs by id."""
        return (run for run, length in enumerate(self.lengths) if length)
