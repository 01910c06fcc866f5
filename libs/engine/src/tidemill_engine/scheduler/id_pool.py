"""Small ids handed out and taken back: rows and sequence slots."""

import heapq


class IdPool:
    """Ids 0..size-1, the smallest free one first, so that tables stay dense."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Ids to be had."""
        return len(self._free)

    def take(self) -> int:
        """A free id."""
        taken = heapq.heappop(self._free)
        self._taken.add(taken)
        return taken

    def give_back(self, taken: int) -> None:
        """Returns an id."""
        self._taken.remove(taken)
        heapq.heappush(self._free, taken)
