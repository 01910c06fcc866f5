"""Free blocks of one cache domain."""


class BlockPool:
    """Hands out block ids 0..num_blocks-1; the most recently freed one first, because its memory is warm."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks; the caller has checked that there are so many."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def free(self, block_ids: list[int]) -> None:
        """Takes blocks back."""
        self._free.extend(reversed(block_ids))
        assert len(self._free) <= self.num_blocks, "a block was freed twice"

    def check_invariants(self, used_elsewhere: list[int]) -> None:
        """Every block is either free or in exactly one other place."""
        seen = self._free + used_elsewhere
        assert len(seen) == self.num_blocks, f"{len(seen)} blocks accounted for, of {self.num_blocks}"
        assert set(seen) == set(range(self.num_blocks)), "a block is in two places"
