"""The router's bounded view of who holds which block: leading depth per holder and tier, whatever the depth.

Holders share one tree of runs (see run_tree). A holder has three bits in a run's mask, one for each tier; a list that
is staged for it has three others, which no match sees until `publish` makes them the holder's.
"""

from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate

from tidemill_kvcache.arena import HUGE_PAGE_BYTES, MAX_SEGMENT_SLOTS, MIN_SEGMENT_SLOTS, SLOT_BYTES
from tidemill_kvcache.hashing import Hashes, pack, split_hashes
from tidemill_kvcache.held_runs import HeldRuns
from tidemill_kvcache.run_tree import RunTree
from tidemill_kvcache.tier_depth import L1, L2, L3, TIERS, TierDepth, depths_along, first_bits, new_depth

__all__ = ["L1", "L2", "L3", "TIERS", "BlockIndex", "TierDepth"]

SEGMENTS = 32
"""A full index has about so many segments, so that vacating one is short."""
MAX_DEAD_SHARE = 0.25
MAX_LIVE_SHARE = 0.8
"""Of the bound. An index that holds more forgets as fast as it learns, so that dead memory has the rest."""
EVICTION_STEPS = 128
"""Runs that an event looks at for those that were not used lately."""
MAX_BYTES_PER_BLOCK = 2048
BLOCKS_PER_EVENT = 4
"""No event takes more than these bytes for each block that it changes and so many others, whatever it makes grow."""
MAX_NAMED_SETS = 64
"""Sets of holders whose names are remembered for the next match."""

Found = tuple[list[int], int]
"""What the index has of a prompt: its runs, and how many leading blocks they hold."""


class BlockIndex:
    """Blocks by holder and tier, bounded by `max_bytes`."""

    def __init__(self, max_bytes: int, *, segment_slots: int = 0) -> None:
        """`segment_slots`, a power of two: unit in which memory is taken in; 0: by the bound."""
        self.max_bytes = max_bytes
        self.num_blocks = 0
        """Entries, one for each (holder, tier, block); what marks a block has a holder of its own."""
        self.evicted_blocks = 0
        self.orphan_runs = 0
        """Stored runs whose parent the holder was not known to have."""
        self._tree = RunTree(segment_slots or _segment_slots(max_bytes))
        self._places: dict[Hashable, int] = {}
        self._staged: dict[Hashable, int] = {}
        self._holder_at: list[Hashable] = []
        self._free_places: list[int] = []
        self._counts: list[list[int]] = []
        self._names: dict[int, list[Hashable]] = {}
        self._unchecked = 0
        """Blocks that may come before the bound must be looked at again."""
        self._hand = 0
        """The run that eviction came to last."""
        self._visible = 0
        """First bit of each place that belongs to a holder."""
        self._keep_bound()

    @property
    def bytes_used(self) -> int:
        """Memory of all entries (an upper bound)."""
        return self._tree.bytes_used

    @property
    def distinct_blocks(self) -> int:
        """Blocks that some holder has, each counted once."""
        return self._tree.store.arena.live_slots

    @property
    def holders(self) -> list[Hashable]:
        """Holders that hold anything."""
        return [holder for holder, place in self._places.items() if any(self._counts[place])]

    def blocks_of(self, holder: Hashable) -> int:
        """Entries of a holder."""
        place = self._places.get(holder)
        return sum(self._counts[place]) if place is not None else 0

    def hashes_of(self, holder: Hashable, tier: int) -> set[bytes]:
        """All blocks of a holder in a tier."""
        return {block_hash for _, packed in self.runs_of(holder, tier) for block_hash in split_hashes(packed)}

    def runs_of(self, holder: Hashable, tier: int) -> Iterator[tuple[bytes, bytes]]:
        """(parent hash, packed hashes) of a holder's runs in a tier, parents before children."""
        return ((parent, packed) for parent, packed, _ in self.marked_runs_of(holder, tier, ()))

    def marked_runs_of(
        self, holder: Hashable, tier: int, marks: Iterable[Hashable]
    ) -> Iterator[tuple[bytes, bytes, bool]]:
        """The same, and whether all blocks of the run are marked by one of `marks` there; else none is."""
        place, mark_bits = self._places.get(holder), self.bits(marks, tier)
        if place is None or not self._counts[place][tier - 1]:
            return
        tree, bit = self._tree, _bit(place, tier)
        runs, done = tree.runs, bytearray(len(tree.runs))
        for leaf in runs:
            above: list[int] = []
            run = leaf
            while run and not done[run]:
                above.append(run)
                done[run] = 1
                run = runs.parents[run]
            for run in reversed(above):
                mask = runs.mask(run)
                if mask & bit:
                    yield tree.parent_hash(run), tree.store.hashes(run), mask & mark_bits != 0

    def stored(self, holder: Hashable, parent: bytes, hashes: Hashes, tier: int) -> None:
        """A run of blocks, each the child of the one before; `parent` is empty for a prompt's first block."""
        place = self._places.get(holder)
        if place is None:
            place = self._new_place(holder)
        self.orphan_runs += not self._add(place, parent, hashes, tier)

    def mark(self, holder: Hashable, hashes: Hashes, tier: int) -> None:
        """A holder has something that belongs to blocks of others, given in any order; quickest the deepest first.

        Blocks that nobody holds are ignored.
        """
        place = self._places.get(holder)
        if place is None:
            place = self._new_place(holder)
        self._mark(place, hashes, tier)

    def stage(self, holder: Hashable, parent: bytes, hashes: Hashes, tier: int) -> None:
        """As `stored`, for the list that `publish` will put in place of the holder's present one."""
        place = self._staged.get(holder)
        if place is None:
            place = self._staged[holder] = self._take_place(holder)
        self._add(place, parent, hashes, tier)

    def stage_mark(self, holder: Hashable, hashes: Hashes, tier: int) -> None:
        """As `mark`, for the list that `publish` will put in place of the holder's present one."""
        place = self._staged.get(holder)
        if place is None:
            place = self._staged[holder] = self._take_place(holder)
        self._mark(place, hashes, tier)

    def publish(self, holder: Hashable) -> None:
        """Replaces all that a holder has by what was staged for it."""
        self.drop(holder)
        place = self._staged.pop(holder, None)
        if place is not None:
            self._places[holder] = place
            self._visible |= _bit(place, L1)

    def removed(self, holder: Hashable, hashes: Hashes, tier: int) -> None:
        """Blocks left a holder's tier, in any order; unknown ones are ignored."""
        place = self._places.get(holder)
        if place is not None:
            cleared = self._tree.clear(pack(hashes), _bit(place, tier))
            self._count(place, tier, -cleared)
            self._tree.store.take_in()
            self._unchecked -= cleared + BLOCKS_PER_EVENT
            if self._unchecked < 0:
                self._keep_bound()

    def drop(self, holder: Hashable) -> None:
        """A holder is gone, or has lost all its blocks."""
        place = self._places.pop(holder, None)
        if place is not None:
            self._visible &= ~_bit(place, L1)
            self._give_place(place)

    def discard_staged(self, holder: Hashable) -> None:
        """Forgets what was staged for a holder."""
        place = self._staged.pop(holder, None)
        if place is not None:
            self._give_place(place)

    def touch(self, holder: Hashable, hashes: Hashes) -> None:
        """Marks a prompt that the holder is to serve as used; costs nothing until the index is half full."""
        if holder in self._places and self.bytes_used * 2 >= self.max_bytes:
            for run in self._tree.path(pack(hashes))[0]:
                self._tree.runs.used[run] = 1

    def match(self, hashes: Hashes) -> dict[Hashable, TierDepth]:
        """Leading depth of each holder that has the first block."""
        return self.depths(self.find(hashes))

    def find(self, hashes: Hashes) -> Found:
        """A prompt, for `depths` and `leading`; good until the index changes."""
        return self._tree.path(pack(hashes))

    def depths(self, found: Found) -> dict[Hashable, TierDepth]:
        """As `match`, of a prompt that was found."""
        runs = self._tree.runs
        path, end = found
        if not path:
            return {}
        mask_of, masks, lengths = runs.sets.masks, runs.masks, runs.lengths
        mask = mask_of[masks[path[0]]]
        holders = (mask | mask >> 1 | mask >> 2) & self._visible
        if len(path) == 1 and not holders & ~mask:
            return dict.fromkeys(self._names_of(holders), new_depth(TierDepth, (end, 0, 0)))
        deep: dict[Hashable, TierDepth] = {}
        for places, depth in depths_along(holders, [(mask_of[masks[run]], lengths[run]) for run in path], end):
            if places & (places - 1):
                deep |= dict.fromkeys(self._names_of(places), depth)
            else:
                deep[self._holder_at[places.bit_length() // 3]] = depth
        return deep

    def holders_in(self, tier: int) -> list[Hashable]:
        """Holders that hold anything in a tier."""
        return [holder for holder, place in self._places.items() if self._counts[place][tier - 1]]

    def leading(self, found: Found, holders: Iterable[Hashable], tier: int) -> int:
        """The leading blocks of a prompt of which each lies in that tier of one of these holders."""
        bits = self.bits(holders, tier)
        runs, depth, (path, end) = self._tree.runs, 0, found
        mask_of, masks, lengths = runs.sets.masks, runs.masks, runs.lengths
        for run in path:
            if not mask_of[masks[run]] & bits:
                return depth
            depth += lengths[run]
        return end

    def holding(self, found: Found, bits: int) -> int:
        """Of these bits, those of holders that have any block of a prompt that was found."""
        runs, held = self._tree.runs, 0
        mask_of, masks = runs.sets.masks, runs.masks
        for run in found[0]:
            held |= mask_of[masks[run]] & bits
            if held == bits:
                break
        return held

    def bits(self, holders: Iterable[Hashable], tier: int) -> int:
        """What stands for a tier of any of these holders in the masks of `along`; unknown ones have nothing."""
        return sum(_bit(self._places[holder], tier) for holder in set(holders) if holder in self._places)

    def along(self, found: Found) -> HeldRuns:
        """Who holds which part of a prompt; good until the index changes."""
        runs, (path, end) = self._tree.runs, found
        ends = [min(depth, end) for depth in accumulate(runs.lengths[run] for run in path)]
        return HeldRuns(ends, [runs.mask(run) for run in path])

    def settle(self) -> None:
        """Does at once what `stored` puts off: from now on each block can be found by its hash."""
        self._tree.store.flush()

    def check_invariants(self) -> None:
        """Tree and counts agree (O(n), for tests)."""
        self._tree.check_invariants()
        counts = [[0, 0, 0] for _ in self._counts]
        runs = self._tree.runs
        for run in runs:
            for place, tier in ((p, t) for p in range(len(counts)) for t in TIERS if runs.mask(run) & _bit(p, t)):
                counts[place][tier - 1] += runs.lengths[run]
        assert counts == self._counts, "a count is wrong"
        assert self.num_blocks == sum(map(sum, counts)), "the sum of the counts is wrong"

    def _add(self, place: int, parent: bytes, hashes: Hashes, tier: int) -> bool:
        packed, bit, parent_held = pack(hashes), _bit(place, tier), True
        gained = self._tree.extend_tail(parent, packed, bit)
        if not gained:
            gained, parent_held = self._tree.extend(parent, packed, bit)
        self._counts[place][tier - 1] += gained
        self.num_blocks += gained
        self._unchecked -= gained + BLOCKS_PER_EVENT
        if self._unchecked < 0:
            self._keep_bound()
        return parent_held

    def _mark(self, place: int, hashes: Hashes, tier: int) -> None:
        marked = self._tree.mark(pack(hashes), _bit(place, tier))
        self._count(place, tier, marked)
        self._unchecked -= marked + BLOCKS_PER_EVENT
        if self._unchecked < 0:
            self._keep_bound()

    def _count(self, place: int, tier: int, change: int) -> None:
        self._counts[place][tier - 1] += change
        self.num_blocks += change

    def _names_of(self, places: int) -> list[Hashable]:
        """Holders by their first bits; those asked for before are remembered until a holder comes or goes."""
        names = self._names.get(places)
        if names is None:
            if len(self._names) >= MAX_NAMED_SETS:
                self._names.clear()
            names = self._names[places] = [self._holder_at[place] for place in _places_in(places)]
        return names

    def _new_place(self, holder: Hashable) -> int:
        place = self._places[holder] = self._take_place(holder)
        self._visible |= _bit(place, L1)
        return place

    def _take_place(self, holder: Hashable) -> int:
        self._names.clear()
        if self._free_places:
            place = self._free_places.pop()
            self._holder_at[place] = holder
            return place
        self._holder_at.append(holder)
        self._counts.append([0, 0, 0])
        return len(self._holder_at) - 1

    def _give_place(self, place: int) -> None:
        if any(self._counts[place]):
            self._tree.clear_all(7 << 3 * place)
            self.num_blocks -= sum(self._counts[place])
            self._counts[place] = [0, 0, 0]
        self._holder_at[place] = None
        self._free_places.append(place)

    def _keep_bound(self) -> None:
        """Takes in dead memory where there is much of it, and forgets a little early enough that no event need much."""
        store, live_bound = self._tree.store, MAX_LIVE_SHARE * self.max_bytes
        store.take_in()
        self._evict(live_bound, EVICTION_STEPS)
        while self.bytes_used > self.max_bytes and self._tree.runs.live:
            used = self.bytes_used
            store.flush()
            if store.arena.dead_slots > MAX_DEAD_SHARE * store.arena.used_slots and store.vacate():
                store.flush()
            if store.table.size - store.arena.live_slots > MAX_DEAD_SHARE * store.table.size:
                store.table.sweep()
            if self.bytes_used >= used:
                self._evict(0, EVICTION_STEPS // 8)
        # What may grow at once: the table of heads by half, two mappings by a page.
        spare = live_bound - self.bytes_used - store.heads.bytes_used - 2 * HUGE_PAGE_BYTES
        self._unchecked = min(int(spare) // MAX_BYTES_PER_BLOCK, store.arena.segment_slots)

    def _evict(self, live_bound: float, steps: int) -> None:
        """Forgets a few runs below which there is none and that were not used lately, if more lives than that."""
        store, runs = self._tree.store, self._tree.runs
        for _ in range(steps):
            if not runs.live or self.bytes_used - store.dead_bytes <= live_bound:
                return
            self._hand = self._hand + 1 if self._hand + 1 < len(runs) else 1
            if runs.children[self._hand]:
                continue
            if runs.used[self._hand]:
                runs.used[self._hand] = 0
            elif runs.lengths[self._hand]:
                self._forget(self._hand)

    def _forget(self, run: int) -> None:
        runs = self._tree.runs
        mask, length = runs.mask(run), runs.lengths[run]
        for place in _places_in(first_bits(mask)):
            for tier in TIERS:
                if mask & _bit(place, tier):
                    self._count(place, tier, -length)
                    self.evicted_blocks += length
        self._tree.remove_leaf(run)


def _bit(place: int, tier: int) -> int:
    if tier not in TIERS:
        raise ValueError(f"{tier} is no tier")
    return 1 << (3 * place + tier - 1)


def _segment_slots(max_bytes: int) -> int:
    slots = MIN_SEGMENT_SLOTS
    while slots < MAX_SEGMENT_SLOTS and 2 * slots * SLOT_BYTES * SEGMENTS <= max_bytes:
        slots *= 2
    return slots


def _places_in(first_bits: int) -> list[int]:
    if first_bits.bit_count() > 4:
        return [place for place, digit in enumerate(bin(first_bits)[:1:-3]) if digit == "1"]
    places = []
    while first_bits:
        places.append((first_bits.bit_length() - 1) // 3)
        first_bits &= ~(1 << (3 * places[-1]))
    return places
