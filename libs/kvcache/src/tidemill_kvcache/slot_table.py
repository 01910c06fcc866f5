"""Where a hash lies in the arena: sorted arrays of keys, merged as they grow.

A key is the upper half of a hash's first word, then its slot, so sorting whole arrays is all that an insert does; each
answer is compared with all 128 bits in the arena. New keys gather in `fresh` arrays and are dealt out to parts, each
with its own range of hashes; a part that outgrows its size is split in two. Nothing is deleted: a key whose slot is
free, or holds another hash by now, is passed over, and such keys are swept out of one part at a time. So whatever the
size of the index, an insert works on a bounded number of keys.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tidemill_kvcache.arena import HashArena, Words

FRESH_KEYS = 32768
"""Keys that gather before they are dealt out."""
PART_KEYS = 131072
"""Of a part when it is split."""
MAX_ARRAYS = 6
"""Of a part, or fresh ones, before they are merged; so many are searched for a hash."""
MOST_ARRAYS = 3 * MAX_ARRAYS
"""Of a part whose turn to be merged has not come yet."""
TENDED_PER_KEY = 8
"""Keys merged or split for each that comes: more than they need on the average, so that no part waits for long."""
MAX_DEAD_SHARE = 0.2
DEAD_SLACK = 4096
"""Dead keys that stay are at most that share and so many."""
KEY_BYTES = 8
ARRAY_BYTES = 256
"""Upper bound of what an array takes beside its keys."""
FEW_RANGES = 8
"""So few ranges of slots are read one by one."""
MAX_PASSED = 64
"""Keys of one hash, dead ones, that a search passes over before it has them swept out."""
SCALAR_LIMIT = 6
"""So few hashes are looked for one by one: quicker than a dozen array operations."""

Slots = npt.NDArray[np.intp]
Keys = npt.NDArray[np.uint64]

_HALF = 32
_PASSED = -2
_SLOT = np.uint64((1 << _HALF) - 1)
_HASH = np.uint64(((1 << _HALF) - 1) << _HALF)


class _Sorted:
    """Sorted arrays of keys."""

    __slots__ = ("arrays", "size")

    def __init__(self, arrays: list[Keys]) -> None:
        self.arrays = arrays
        self.size = sum(map(len, arrays))

    def add(self, keys: Keys) -> None:
        """Takes in sorted keys."""
        self.arrays.append(keys)
        self.size += len(keys)

    def merge(self) -> int:
        """Makes one of the last arrays, and of those that all that follows outweighs; returns its length."""
        first, behind = len(self.arrays) - 2, len(self.arrays[-1])
        for at in range(len(self.arrays) - 2, -1, -1):
            if behind >= len(self.arrays[at]):
                first = at
            behind += len(self.arrays[at])
        self.arrays[first:] = [_merged(self.arrays[first:])]
        return len(self.arrays[-1])

    def take(self) -> Keys:
        """All keys, in order; none are left."""
        keys = _merged(self.arrays)
        self.arrays, self.size = [], 0
        return keys


class SlotTable:
    """Slots by hash."""

    def __init__(self, arena: HashArena) -> None:
        self._arena = arena
        self._fresh = _Sorted([])
        self._parts = [_Sorted([])]
        self._lows = [0]
        """First key of each part."""
        self._in_parts = 0
        self._next_part = self._tended = 0

    @property
    def size(self) -> int:
        """Keys, dead ones among them."""
        return self._fresh.size + self._in_parts

    @property
    def bytes_used(self) -> int:
        """Memory of the arrays (an upper bound)."""
        return self.size * KEY_BYTES + (len(self._parts) + 1) * MOST_ARRAYS * ARRAY_BYTES

    @property
    def max_size(self) -> float:
        """Keys at which sweeping begins."""
        return self._arena.live_slots / (1 - MAX_DEAD_SHARE) + DEAD_SLACK

    def insert(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Makes filled slots findable, given as ranges."""
        keys = self._keys_of(starts, ends)
        keys.sort()
        self._fresh.add(keys)
        if len(self._fresh.arrays) > MAX_ARRAYS:
            self._fresh.merge()
        if self._fresh.size > FRESH_KEYS:
            self._deal_out()
        self._tend(TENDED_PER_KEY * len(keys))
        if self.size > self.max_size:
            self.sweep()

    def find(self, block_hash: bytes, most_passed: int = MAX_PASSED) -> int:
        """The slot of a hash; -1: there is none. Sweeps where more keys are passed over than that."""
        key = np.frombuffer(block_hash, "<u8", 1) & _HASH
        low = key.item()
        high, passed = low + (1 << _HALF), 0
        part = bisect_right(self._lows, low) - 1
        # The largest arrays come first, where most blocks are.
        for arrays in (self._parts[part].arrays, self._fresh.arrays):
            for keys in arrays:
                at, end = keys.searchsorted(key).item(), len(keys)
                while at < end and (entry := keys.item(at)) < high:
                    slot = entry - low
                    if self._arena.hash_at(slot) == block_hash and self._arena.owners.item(slot):
                        return slot
                    at, passed = at + 1, passed + 1
                    if passed > most_passed:
                        self._deal_out()
                        self._sweep_part(part)
                        return self.find(block_hash, self.size)
        return -1

    def find_all(self, words: Words) -> Slots:
        """The slot of each hash; -1: there is none."""
        if len(words) <= SCALAR_LIMIT:
            return np.array([self.find(word.tobytes()) for word in words], np.intp)
        order = np.argsort(words[:, 0])
        asked = words.take(order, axis=0)
        keys = asked[:, 0] & _HASH
        found = np.full(len(words), -1, np.intp)
        for array in self._fresh.arrays:
            self._find_in(array, keys, asked, found)
        ends = [*keys.searchsorted(np.array(self._lows[1:], np.uint64)).tolist(), len(keys)]
        start = 0
        for part, end in zip(self._parts, ends, strict=True):
            for array in part.arrays if end > start else ():
                self._find_in(array, keys[start:end], asked[start:end], found[start:end])
            start = end
        for index in np.flatnonzero(found == _PASSED).tolist():
            found[index] = self.find(asked[index].tobytes())
        slots = np.empty_like(found)
        slots[order] = found
        return slots

    def sweep(self) -> None:
        """Leaves only live keys in the next part of the table."""
        if self._next_part >= len(self._parts):
            self._next_part = 0
        if self._next_part == 0:
            self._deal_out()
        self._sweep_part(self._next_part)
        self._next_part += 1

    def check_invariants(self) -> None:
        """Keys are in order, where they belong, and few are dead (for tests)."""
        assert self._in_parts == sum(part.size for part in self._parts), "keys are not counted"
        assert all(low < high for low, high in pairwise(self._lows)), "parts overlap"
        for part, low, high in zip(self._parts, self._lows, [*self._lows[1:], 1 << 64], strict=True):
            assert part.size == sum(map(len, part.arrays)), "keys of a part are not counted"
            assert len(part.arrays) <= MOST_ARRAYS, "a hash is looked for in many arrays"
            for keys in part.arrays:
                assert len(keys), "an array is empty"
                assert (keys[1:] >= keys[:-1]).all(), "keys are not in order"
                assert low <= keys.item(0) <= keys.item(-1) < high, "a key is in another part"

    def _keys_of(self, starts: Sequence[int], ends: Sequence[int]) -> Keys:
        words = self._arena.words
        if len(starts) > FEW_RANGES:
            firsts = np.array(starts)
            counts = np.array(ends) - firsts
            slots = np.repeat(firsts - (counts.cumsum() - counts), counts)
            slots += np.arange(len(slots))
            # `take` of a column would copy the whole column first.
            keys: Keys = words.ravel().take(2 * slots)
            keys &= _HASH
            keys |= slots.view(np.uint64)
            return keys
        keys, at = np.empty(sum(ends) - sum(starts), np.uint64), 0
        for start, end in zip(starts, ends, strict=True):
            part = keys[at : at + end - start]
            np.bitwise_and(words[start:end, 0], _HASH, out=part)
            part |= np.arange(start, end, dtype=np.uint64)
            at += end - start
        return keys

    def _deal_out(self) -> None:
        """Moves fresh keys to the parts that they belong to."""
        keys = self._fresh.take()
        cuts = [0, *keys.searchsorted(np.array(self._lows[1:], np.uint64)).tolist(), len(keys)]
        for number in range(len(self._parts) - 1, -1, -1):
            # A copy, so that the whole array does not stay for one part's sake.
            self._put(number, keys[cuts[number] : cuts[number + 1]].copy() if len(cuts) > 2 else keys)

    def _put(self, number: int, keys: Keys) -> None:
        """Sorted keys into a part."""
        if len(keys):
            self._parts[number].add(keys)
            self._in_parts += len(keys)

    def _sweep_part(self, number: int) -> None:
        part = self._parts[number]
        self._in_parts -= part.size
        self._put(number, self._living(part.take()))

    def _tend(self, budget: int) -> None:
        """Splits parts that are too large and merges arrays where they are too many, in turn, about so many keys."""
        for _ in range(len(self._parts)):
            if budget <= 0:
                return
            self._tended = self._tended + 1 if self._tended + 1 < len(self._parts) else 0
            part = self._parts[self._tended]
            if len(part.arrays) > MAX_ARRAYS:
                budget -= part.merge()
            if part.size > PART_KEYS:
                budget -= part.size
                self._split(self._tended)

    def _split(self, number: int) -> None:
        part = self._parts[number]
        largest = part.arrays[0]
        middle = largest.item(len(largest) // 2) & ~int(_SLOT)
        if middle <= self._lows[number]:
            # One hash that came and went very often.
            self._sweep_part(number)
            return
        cuts = [array.searchsorted(np.array([middle], np.uint64)).item() for array in part.arrays]
        lower = [array[:cut].copy() for array, cut in zip(part.arrays, cuts, strict=True) if cut]
        upper = [array[cut:].copy() for array, cut in zip(part.arrays, cuts, strict=True) if cut < len(array)]
        self._parts[number : number + 1] = [_Sorted(lower), _Sorted(upper)]
        self._lows.insert(number + 1, middle)

    def _living(self, keys: Keys) -> Keys:
        """Each key once whose slot still holds its hash."""
        slots = (keys & _SLOT).astype(np.intp)
        live = self._arena.owners.take(slots) != 0
        live &= self._arena.words.ravel().take(2 * slots) & _HASH == keys & _HASH
        live[1:] &= keys[1:] != keys[:-1]
        return keys.take(np.flatnonzero(live))

    def _find_in(self, array: Keys, keys: Keys, asked: Words, found: Slots) -> None:
        """Fills in those of `found` that are lacking and lie in this array; _PASSED where too many keys are alike."""
        todo = np.flatnonzero(found < 0)
        at = array.searchsorted(keys.take(todo))
        for _ in range(MAX_PASSED):
            entries = array.take(at, mode="clip")
            there = np.flatnonzero((at < len(array)) & (entries & _HASH == keys.take(todo)))
            todo, at, slots = todo.take(there), at.take(there) + 1, (entries.take(there) & _SLOT).astype(np.intp)
            same = (self._arena.words.take(slots, axis=0) == asked.take(todo, axis=0)).all(axis=1)
            same &= self._arena.owners.take(slots) != 0
            hit = np.flatnonzero(same)
            found[todo.take(hit)] = slots.take(hit)
            further = np.flatnonzero(~same)
            todo, at = todo.take(further), at.take(further)
            if not todo.size:
                return
        found[todo] = _PASSED


def _merged(arrays: Sequence[Keys]) -> Keys:
    if len(arrays) == 1:
        return arrays[0]
    keys = np.concatenate(arrays) if arrays else np.empty(0, np.uint64)
    keys.sort()
    return keys
