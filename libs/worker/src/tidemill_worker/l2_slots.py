"""Which block lies in which slot of L2, for all ranks of a domain alike. Pure.

A block is found only once its bytes are in place. One that is being read or filled is pinned; eviction takes the least
recently used block that nobody has pinned and no other block of L2 follows, so that chains leave from their ends.
"""

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill_kvcache.runs import CacheEvent, EventLog
from tidemill_worker.residents import StoredBlock


@dataclass(slots=True, eq=False)
class L2Block:
    """One block and its slots."""

    block_hash: bytes
    parent: bytes
    slot: int
    snapshot_slot: int
    tenant: str
    depth: int
    pins: int = 0
    used_at: int = 0
    present: bool = False
    """Its bytes are in place and it can be found."""
    offered_down: bool = False
    """L3 was told that it is about to leave."""


_Entry = tuple[int, int, L2Block]
"""(when it was used, slot, block): a leaf in order of eviction, outdated once it was used again or is none any more."""


class L2Slots:
    """The directory of one domain's L2."""

    def __init__(self, num_blocks: int, num_snapshots: int) -> None:
        self.num_slots = num_blocks
        self.filled_blocks = 0
        self.evicted_blocks = 0
        self.unoffered_blocks = 0
        """Of these, those that L3 was not told of."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._blocks: dict[bytes, L2Block] = {}
        self._filling: dict[bytes, L2Block] = {}
        self._with_snapshot: OrderedDict[L2Block, None] = OrderedDict()
        self._children: Counter[bytes] = Counter()
        self._leaves: list[_Entry] = []
        self._clock = itertools.count(1)
        self._events = EventLog()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are being read or filled."""
        return sum(block.pins > 0 for block in self._blocks.values()) + len(self._filling)

    def get(self, block_hash: bytes) -> L2Block | None:
        """The block, if its bytes are in place."""
        return self._blocks.get(block_hash)

    def lacks(self, block: StoredBlock) -> bool:
        """Whether a copy is wanted: it is neither here, with the snapshot that it has, nor on its way."""
        if block.block_hash in self._filling:
            return False
        held = self._blocks.get(block.block_hash)
        return held is None or (block.has_snapshot and held.snapshot_slot < 0)

    def reserve(self, block: StoredBlock, *, with_snapshot: bool) -> L2Block | None:
        """Slots for a block to be filled, taken from others if need be; None when all are in use."""
        assert block.block_hash not in self._filling, "the block is being filled already"
        slot = self._take_slot()
        if slot is None:
            return None
        snapshot_slot = self._take_snapshot_slot() if with_snapshot else -1
        if with_snapshot and snapshot_slot < 0:
            # The block and its snapshot are stored together or not at all.
            self._free.append(slot)
            return None
        made = L2Block(block.block_hash, block.parent, slot, snapshot_slot, block.tenant, block.depth, pins=1)
        self._filling[block.block_hash] = made
        return made

    def without_snapshot(self, block: L2Block) -> None:
        """A block's snapshot did not come, and its slot still has the bytes of another one; told before `filled`."""
        if block.snapshot_slot >= 0:
            self._free_snapshots.append(block.snapshot_slot)
            block.snapshot_slot = -1

    def filled(self, block: L2Block) -> None:
        """The bytes are in place: the block takes the place of an older copy, and can be found."""
        if self._filling.get(block.block_hash) is not block:
            self._free_slots(block)
            return
        del self._filling[block.block_hash]
        older, has_snapshot = self._blocks.get(block.block_hash), block.snapshot_slot >= 0
        if older is None:
            self._children[block.parent] += 1
        elif older.snapshot_slot >= 0 and not has_snapshot:
            self._events.snapshot_dropped(block.block_hash)
        if older is None or (has_snapshot and older.snapshot_slot < 0):
            self._events.stored(block.parent, block.block_hash, has_snapshot)
        if older is not None:
            self._withdraw(older)
        block.pins, block.present = 0, True
        self._blocks[block.block_hash] = block
        self.filled_blocks += 1
        if block.snapshot_slot >= 0:
            self._with_snapshot[block] = None
        self.touch([block])

    def failed(self, block: L2Block) -> None:
        """The bytes did not come."""
        if self._filling.get(block.block_hash) is block:
            del self._filling[block.block_hash]
        self._free_slots(block)

    def touch(self, blocks: Sequence[L2Block]) -> None:
        """These were used; the first ones, which more prompts share, most recently."""
        for block in reversed(blocks):
            block.used_at = next(self._clock)
            if block in self._with_snapshot:
                self._with_snapshot.move_to_end(block)
            self._offer(block)

    def pin(self, blocks: Iterable[L2Block]) -> None:
        """Keeps blocks while their slots are read."""
        for block in blocks:
            block.pins += 1

    def unpin(self, blocks: Iterable[L2Block]) -> None:
        """The reading is over."""
        for block in blocks:
            assert block.pins > 0, "a block was unpinned twice"
            block.pins -= 1
            if block.pins:
                continue
            if block.present:
                self._offer(block)
            else:
                self._free_slots(block)

    def drop(self, block: L2Block) -> None:
        """The block is damaged."""
        if block.present:
            self._remove(block)

    def clear(self) -> None:
        """Forgets everything; what is being read or filled keeps its slots until that is over."""
        for block in list(self._blocks.values()):
            self._withdraw(block)
        self._blocks.clear()
        self._filling.clear()
        self._children.clear()
        self._events.take()

    def coldest(self, count: int) -> list[L2Block]:
        """Blocks that would be evicted next, in order, if nothing was used meanwhile: chains from their ends on.

        Takes what is found, and once what is outdated, from the heap; the rest of it is not looked at.
        """
        taken: list[_Entry] = []
        followers: list[_Entry] = []
        children: dict[bytes, int] = {}
        found: list[L2Block] = []
        while len(found) < count and (self._leaves or followers):
            if followers and (not self._leaves or followers[0] < self._leaves[0]):
                block = heapq.heappop(followers)[2]
            else:
                entry = heapq.heappop(self._leaves)
                # A block that was offered twice lies there twice, one behind the other.
                if not self._is_current(entry) or taken[-1:] == [entry]:
                    continue
                taken.append(entry)
                block = entry[2]
            found.append(block)
            children[block.parent] = children.get(block.parent, self._children[block.parent]) - 1
            parent = self._blocks.get(block.parent)
            if parent is not None and not children[block.parent] and not parent.pins:
                heapq.heappush(followers, (parent.used_at, parent.slot, parent))
        for entry in taken:
            heapq.heappush(self._leaves, entry)
        return found

    def take_events(self) -> list[CacheEvent]:
        """What came and went since the last call, in order."""
        return self._events.take()

    def _take_slot(self) -> int | None:
        if not self._free and not self._evict():
            return None
        return self._free.pop() if self._free else None

    def _take_snapshot_slot(self) -> int:
        """A free snapshot slot, or that of the least recently used block, which stays without; -1: none."""
        if not self._free_snapshots:
            block = next((block for block in self._with_snapshot if not block.pins), None)
            if block is None:
                return -1
            del self._with_snapshot[block]
            self._free_snapshots.append(block.snapshot_slot)
            block.snapshot_slot = -1
            self._events.snapshot_dropped(block.block_hash)
        return self._free_snapshots.pop()

    def _evict(self) -> bool:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                self._remove(entry[2])
                self.evicted_blocks += 1
                self.unoffered_blocks += not entry[2].offered_down
                return True
        return False

    def _is_current(self, entry: _Entry) -> bool:
        used_at, _, block = entry
        return self._is_leaf(block) and block.used_at == used_at

    def _is_leaf(self, block: L2Block) -> bool:
        return block.present and not block.pins and block.block_hash not in self._children

    def _offer(self, block: L2Block) -> None:
        """Lets eviction know of a block that has become a leaf, or an older one."""
        if self._is_leaf(block):
            heapq.heappush(self._leaves, (block.used_at, block.slot, block))
        if len(self._leaves) > 4 * self.num_slots + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._is_current(entry)]
            heapq.heapify(self._leaves)

    def _remove(self, block: L2Block) -> None:
        del self._blocks[block.block_hash]
        self._events.removed(block.block_hash)
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]
            if (parent := self._blocks.get(block.parent)) is not None:
                self._offer(parent)
        self._withdraw(block)

    def _withdraw(self, block: L2Block) -> None:
        """Takes a block's slots back, at once or when its reading is over."""
        block.present = False
        self._with_snapshot.pop(block, None)
        if not block.pins:
            self._free_slots(block)

    def _free_slots(self, block: L2Block) -> None:
        self._free.append(block.slot)
        if block.snapshot_slot >= 0:
            self._free_snapshots.append(block.snapshot_slot)
