"""The router's bounded view of who holds which block: leading depth per holder, in time that hardly grows with depth.

Each (holder, tier) has a shelf: a dict from block hash to the chunk that the hash was last stored or used in. Chunks
lie in order of age; the bound is kept by dropping the oldest chunk, and a holder leaves with its shelves.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

ENTRY_BYTES = 160
"""Upper bound of the memory of one entry: hash, dict slot after a resize, place in its chunk."""
CHUNK_ENTRIES = 256

L1, L2, L3 = 1, 2, 3
"""Tiers, numbered as tidemill.mesh.v1.Tier."""
TIERS = (L1, L2, L3)


@dataclass(frozen=True, slots=True)
class TierDepth:
    """Leading blocks of a prompt at a holder: `l1` from the first block on, then `l2`, then `l3` after those."""

    l1: int = 0
    l2: int = 0
    l3: int = 0

    @property
    def total(self) -> int:
        """Leading blocks in any tier."""
        return self.l1 + self.l2 + self.l3


@dataclass(slots=True, eq=False)
class _Chunk:
    """Hashes of one shelf that were stored or used at about the same time."""

    shelf: "_Shelf"
    hashes: list[bytes] = field(default_factory=list)
    live: int = 0
    """Hashes that are in no younger chunk and not removed."""


@dataclass(slots=True, eq=False)
class _Shelf:
    """Blocks of one (holder, tier)."""

    blocks: dict[bytes, _Chunk] = field(default_factory=dict)
    open_chunk: _Chunk | None = None
    """The youngest chunk, while it has room."""


class BlockIndex:
    """Blocks by holder and tier, bounded by `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_blocks = 0
        """Entries, one for each (holder, tier, block)."""
        self.evicted_blocks = 0
        self.orphan_runs = 0
        """Stored runs whose parent the holder was not known to have."""
        self._holders: dict[Hashable, dict[int, _Shelf]] = {}
        self._staged: dict[Hashable, dict[int, _Shelf]] = {}
        self._chunks: OrderedDict[_Chunk, None] = OrderedDict()

    @property
    def bytes_used(self) -> int:
        """Memory of all entries (an upper bound)."""
        return self.num_blocks * ENTRY_BYTES

    @property
    def holders(self) -> list[Hashable]:
        """Holders that hold anything."""
        return list(self._holders)

    def blocks_of(self, holder: Hashable) -> int:
        """Entries of a holder."""
        return sum(len(shelf.blocks) for shelf in self._holders.get(holder, {}).values())

    def hashes_of(self, holder: Hashable, tier: int) -> set[bytes]:
        """All blocks of a holder in a tier."""
        shelf = self._holders.get(holder, {}).get(tier)
        return set(shelf.blocks) if shelf else set()

    def stored(self, holder: Hashable, parent: bytes, hashes: Sequence[bytes], tier: int) -> None:
        """A run of blocks, each the child of the one before; `parent` is empty for a prompt's first block."""
        shelves = self._holders.setdefault(holder, {})
        if parent and not any(parent in shelf.blocks for shelf in shelves.values()):
            self.orphan_runs += 1
        self._put(shelves.setdefault(tier, _Shelf()), hashes)

    def stage(self, holder: Hashable, hashes: Sequence[bytes], tier: int) -> None:
        """Adds to the list that `publish` will put in place of the holder's present one."""
        self._put(self._staged.setdefault(holder, {}).setdefault(tier, _Shelf()), hashes)

    def publish(self, holder: Hashable) -> None:
        """Replaces all that a holder has by what was staged for it."""
        staged = self._staged.pop(holder, None)
        self.drop(holder)
        if staged is not None:
            self._holders[holder] = staged

    def removed(self, holder: Hashable, hashes: Iterable[bytes], tier: int) -> None:
        """Blocks left a holder's tier; unknown ones are ignored."""
        shelf = self._holders.get(holder, {}).get(tier)
        if shelf is not None:
            self._forget(shelf, hashes)

    def drop(self, holder: Hashable) -> None:
        """A holder is gone, or has lost all its blocks."""
        self._remove(self._holders.pop(holder, {}))

    def discard_staged(self, holder: Hashable) -> None:
        """Forgets what was staged for a holder."""
        self._remove(self._staged.pop(holder, {}))

    def touch(self, holder: Hashable, hashes: Sequence[bytes]) -> None:
        """Marks what the holder has of a prompt as used; costs nothing until the index is half full."""
        if self.bytes_used * 2 < self.max_bytes:
            return
        for shelf in self._holders.get(holder, {}).values():
            present = list(takewhile(shelf.blocks.__contains__, hashes))
            self._forget(shelf, present)
            self._append(shelf, present)

    def match(self, hashes: Sequence[bytes]) -> dict[Hashable, TierDepth]:
        """Leading depth of each holder that has the first block."""
        depths = {}
        if hashes:
            first = hashes[0]
            for holder, shelves in self._holders.items():
                if any(first in shelf.blocks for shelf in shelves.values()):
                    depths[holder] = _depth(shelves, hashes)
        return depths

    def _put(self, shelf: _Shelf, hashes: Sequence[bytes]) -> None:
        if not shelf.blocks.keys().isdisjoint(hashes):
            self._forget(shelf, hashes)
        self._append(shelf, hashes)
        while self.bytes_used > self.max_bytes:
            self._evict_oldest()

    def _remove(self, shelves: dict[int, _Shelf]) -> None:
        for shelf in shelves.values():
            self.num_blocks -= len(shelf.blocks)
            for chunk in set(shelf.blocks.values()):
                del self._chunks[chunk]

    def _append(self, shelf: _Shelf, hashes: Sequence[bytes]) -> None:
        """Adds hashes that are not on the shelf."""
        if not hashes:
            return
        chunk = shelf.open_chunk
        if chunk is None:
            shelf.open_chunk = chunk = _Chunk(shelf)
            self._chunks[chunk] = None
        before = len(shelf.blocks)
        shelf.blocks.update(dict.fromkeys(hashes, chunk))
        added = len(shelf.blocks) - before
        chunk.hashes.extend(hashes)
        chunk.live += added
        self.num_blocks += added
        if len(chunk.hashes) >= CHUNK_ENTRIES:
            shelf.open_chunk = None

    def _forget(self, shelf: _Shelf, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            chunk = shelf.blocks.pop(block_hash, None)
            if chunk is None:
                continue
            self.num_blocks -= 1
            chunk.live -= 1
            if chunk.live == 0:
                self._discard(chunk)
            elif chunk.live * 2 < len(chunk.hashes):
                chunk.hashes = [h for h in dict.fromkeys(chunk.hashes) if shelf.blocks.get(h) is chunk]

    def _discard(self, chunk: _Chunk) -> None:
        del self._chunks[chunk]
        if chunk.shelf.open_chunk is chunk:
            chunk.shelf.open_chunk = None

    def _evict_oldest(self) -> None:
        chunk = next(iter(self._chunks))
        self._discard(chunk)
        live = [h for h in dict.fromkeys(chunk.hashes) if chunk.shelf.blocks.get(h) is chunk]
        for block_hash in live:
            del chunk.shelf.blocks[block_hash]
        self.num_blocks -= len(live)
        self.evicted_blocks += len(live)


def _depth(shelves: dict[int, _Shelf], hashes: Sequence[bytes]) -> TierDepth:
    present = {tier: shelf.blocks.__contains__ for tier, shelf in shelves.items()}
    l1 = _closed_depth(present[L1], hashes) if L1 in present else 0
    l2 = _run_length(present[L2], hashes, l1) if L2 in present else 0
    return TierDepth(l1, l2, _run_length(present[L3], hashes, l1 + l2) if L3 in present else 0)


def _closed_depth(present: Callable[[bytes], bool], hashes: Sequence[bytes]) -> int:
    """Leading depth where a present block implies its whole path, as in a worker's tree: binary search."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if present(hashes[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def _run_length(present: Callable[[bytes], bool], hashes: Sequence[bytes], start: int) -> int:
    """Present blocks from `start` on; L2 and L3 evict blocks singly, so there may be holes."""
    return len(list(takewhile(present, hashes[start:])))
