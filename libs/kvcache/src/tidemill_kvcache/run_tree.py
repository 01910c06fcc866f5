"""A path-compressed tree of hash runs with, for each run, who holds it.

A run is a stretch of one chain whose blocks all have the same holders, a bit mask. A hash names all that precedes it,
so two chains that agree at one depth agree above it too: comparing the last block of a run compares the run, and where
chains part is found by bisection. Runs are ids of rows (see run_table); 0 is no run.

A store that reaches into a run, or a removal from its middle, splits it; neighbours that have the same holders again
are merged. A run without holders stays while others hang below it.
"""

from collections.abc import Iterator

from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_kvcache.orphans import Orphans
from tidemill_kvcache.run_store import RunStore

FEW_BLOCKS = 6
"""A chain that grew by no more will go on."""
GROWING_BLOCKS = 256
"""A run that grows by a few blocks at a time is kept in one piece up to this length."""
GROWING_ROOM = 16


class RunTree:
    """Runs by the hash of their first block; whoever changes masks keeps his own counts of blocks."""

    def __init__(self, segment_slots: int) -> None:
        self.store = RunStore(segment_slots)
        self.runs = self.store.runs
        self._heads = self.store.heads
        self._orphans = Orphans()
        self._waiting = self._orphans.missing_of

    @property
    def bytes_used(self) -> int:
        """Memory of everything (an upper bound)."""
        return self.store.bytes_used + self._orphans.bytes_used

    def parent_hash(self, run: int) -> bytes:
        """Hash of the block before the run; empty for a prompt's first one."""
        parent = self.runs.parents[run]
        return self.store.tail(parent) if parent else self._orphans.missing(run)

    def path(self, packed: bytes) -> tuple[list[int], int]:
        """The runs that a prompt goes through from its first block on, and how many of its leading blocks they hold."""
        runs, arena = self.runs, self.store.arena
        lengths, parents, children, stored = runs.lengths, runs.parents, runs.children, arena.stored
        run, total, end = self._heads.find(packed[:HASH_BYTES]), len(packed), 0
        if not run or parents[run] or run in self._waiting:
            return [], 0
        path = [run]
        while True:
            begin, length = end, lengths[run]
            end += length * HASH_BYTES
            # A chain that goes on in a child of the run holds all of the run.
            if not children[run] or end >= total:
                break
            head, behind = packed[end : end + HASH_BYTES], runs.starts[run] + length
            # What was split off a run lies right behind it.
            at = behind * HASH_BYTES
            child = arena.owners.item(behind) if stored[at : at + HASH_BYTES] == head else 0
            if not child:
                child = self._heads.find(head)
            if not child or parents[child] != run:
                break
            path.append(child)
            run = child
        stop = min(end, total)
        at = runs.starts[run] * HASH_BYTES + stop - begin
        # Most often all of the last run agrees.
        if stored[at - HASH_BYTES : at] == packed[stop - HASH_BYTES : stop]:
            return path, stop // HASH_BYTES
        return path, begin // HASH_BYTES + self._common(run, packed, begin // HASH_BYTES)

    def extend(self, parent: bytes, packed: bytes, bit: int) -> tuple[int, bool]:
        """Gives `bit` to a chain of blocks behind `parent`, new ones among them.

        Returns how many did not have it, and whether the parent was there with a bit of the same holder.
        """
        runs, orphans, waiting = self.runs, self._orphans, self._waiting
        above, missing, parent_held = 0, b"", True
        if parent:
            above = self._ending_with(parent)
            missing = b"" if above else parent
            parent_held = above != 0 and runs.mask(above) & _holder_bits(bit) != 0
        at, total, gained = 0, len(packed) // HASH_BYTES, 0
        while at < total:
            child = self._heads.find(packed[at * HASH_BYTES : at * HASH_BYTES + HASH_BYTES])
            if not child:
                end = orphans.next_awaited(packed, at) if waiting else total
                part = memoryview(packed)[at * HASH_BYTES : end * HASH_BYTES] if end - at < total else packed
                grows = parent != b"" and parent_held and end == total
                above = self._append(above, part, bit, missing, grows=grows)
                gained += end - at
                if waiting:
                    self._adopt_orphans(above)
            elif runs.parents[child] == above and waiting.get(child, b"") == missing:
                common = self._common(child, packed, at)
                end, mask = at + common, runs.mask(child)
                held = mask & bit
                if common < runs.lengths[child] and (end < total or not held):
                    child = self._front(child, common)
                if not held:
                    runs.set_mask(child, mask | bit)
                    gained += end - at
                    self._merge_up(child)
                above = child
            else:
                # The hash lies behind another block already: whatever this is, it is no chain of hashes.
                break
            at, missing = end, b""
        if above and runs.children[above] == 1:
            self._merge_down(above)
        return gained, parent_held

    def extend_tail(self, parent: bytes, packed: bytes, bit: int) -> int:
        """What `extend` does, in few steps, where a chain that one holder has goes on behind its last event.

        Returns the new blocks; 0: it is not so, and nothing was changed.
        """
        store, runs = self.store, self.runs
        run = store.tails.get(parent, 0)
        if not run or runs.children[run] or runs.sets.masks[runs.masks[run]] != bit or self._waiting or not packed:
            return 0
        end = (runs.starts[run] + runs.lengths[run]) * HASH_BYTES
        # That nothing lies behind it yet is known then: it has no child, and no run waits for its parent.
        if store.arena.stored[end - HASH_BYTES : end] != parent or not self._grow(run, packed):
            return 0
        return len(packed) // HASH_BYTES

    def clear(self, packed: bytes, bit: int) -> int:
        """Takes `bit` from blocks in any order; returns how many had it."""
        cleared = 0
        for run, start, stop in self._parts(packed):
            if self.runs.mask(run) & bit:
                cleared += stop - start
                self._clear_part(run, start, stop, bit)
        return cleared

    def mark(self, packed: bytes, bit: int) -> int:
        """Gives `bit` to blocks that somebody has, in any order; returns how many did not have it."""
        runs, marked = self.runs, 0
        for run, start, stop in self._parts(packed):
            mask = runs.mask(run)
            if mask and not mask & bit:
                marked += stop - start
                part = self._part(run, start, stop)
                runs.set_mask(part, mask | bit)
                self._tidy(part)
        return marked

    def clear_all(self, bits: int) -> None:
        """Takes bits from every run."""
        runs = self.runs
        held = runs.held_by(bits)
        for run in held:
            runs.set_mask(run, runs.mask(run) & ~bits)
        for run in held:
            if runs.lengths[run]:
                self._tidy(run)

    def remove_leaf(self, run: int) -> None:
        """Takes out a run below which there is none."""
        assert self.runs.children[run] == 0, "others hang below the run"
        self.runs.set_mask(run, 0)
        self._tidy(run)

    def check_invariants(self) -> None:
        """Runs, keys and links agree (O(n), for tests)."""
        self.store.check_invariants()
        runs = self.runs
        children: dict[int, int] = {}
        assert len(self._heads) == runs.live, "a run has no key"
        for run in runs:
            assert self._heads.find(self.store.head(run)) == run, "a key is not the run's first hash"
            assert runs.mask(run) or runs.children[run], "a run is of no use"
            if parent := runs.parents[run]:
                assert runs.lengths[parent], "a parent ended before its child"
                children[parent] = children.get(parent, 0) + 1
        assert all(runs.children[run] == children.get(run, 0) for run in runs), "a child is not counted"
        assert all(runs.lengths[run] and not runs.parents[run] for run in self._orphans), (
            "an orphan ended, or has a parent"
        )

    def _common(self, run: int, packed: bytes, at: int) -> int:
        """Leading blocks of a run, whose first one agrees, that agree with `packed` from block `at` on."""
        stored, start = self.store.arena.stored, self.runs.starts[run]
        low, high = 1, min(self.runs.lengths[run], len(packed) // HASH_BYTES - at)
        there, here = (start - 1) * HASH_BYTES, (at - 1) * HASH_BYTES
        # Most often all of them do.
        middle = high
        while low < high:
            to = middle * HASH_BYTES
            if stored[there + to : there + to + HASH_BYTES] == packed[here + to : here + to + HASH_BYTES]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _ending_with(self, block_hash: bytes) -> int:
        """A run whose last block this is, split off if need be."""
        run, place = self.store.locate(block_hash)
        return self._front(run, place + 1) if run else 0

    def _append(self, above: int, packed: bytes | memoryview, bit: int, missing: bytes, *, grows: bool) -> int:
        """New blocks below `above`, in as many runs as the arena's segments ask for; returns the last one.

        `grows`: they follow what the holder has, as those of a request that decodes.
        """
        runs, arena = self.runs, self.store.arena
        if above and runs.children[above] == 0 and runs.mask(above) == bit and self._grow(above, packed):
            return above
        few = grows and above != 0 and len(packed) <= FEW_BLOCKS * HASH_BYTES
        run, rest = above, memoryview(packed)
        while rest:
            count = arena.room(len(rest) // HASH_BYTES)
            part, rest = rest[: count * HASH_BYTES], rest[count * HASH_BYTES :]
            if run:
                runs.children[run] += 1
            start = arena.reserve(count)
            run = runs.add(start, count, run, bit)
            self.store.write(run, start, part)
            self._heads.add(run)
            if missing:
                self._orphans.add(run, missing)
                missing = b""
        if few:
            runs.rooms[run] = arena.reserve_behind(self.store.end(run), GROWING_ROOM)
        return run

    def _grow(self, run: int, packed: bytes | memoryview) -> bool:
        """Adds blocks to the end of a run in place, moving it to a wider one while it is short."""
        runs, count = self.runs, len(packed) // HASH_BYTES
        room, length = runs.rooms[run], runs.lengths[run]
        if count > room:
            room += self.store.arena.reserve_behind(runs.starts[run] + length + room, count - room)
            if count > room and length + count <= GROWING_BLOCKS:
                runs.rooms[run] = room
                self.store.relocate(run, spare=count + max(8, length // 2))
                room = runs.rooms[run]
            if count > room:
                runs.rooms[run] = room
                return False
        self.store.write(run, runs.starts[run] + length, packed)
        runs.lengths[run] = length + count
        runs.rooms[run] = room - count
        return True

    def _front(self, run: int, count: int) -> int:
        """The first `count` blocks as a run of their own; `run` keeps the rest and its children."""
        runs = self.runs
        start, length = runs.starts[run], runs.lengths[run]
        if count == length:
            return run
        front = runs.add(start, count, runs.parents[run], runs.mask(run))
        runs.children[front] = 1
        runs.used[front] = runs.used[run]
        self.store.own(front, start, count)
        self._heads.replace(run, front)
        runs.starts[run], runs.lengths[run], runs.parents[run] = start + count, length - count, front
        self._heads.add(run)
        if self._waiting:
            self._orphans.pass_on(run, front)
        return front

    def _merge_up(self, run: int) -> None:
        """Joins a run with the one before it if nothing tells them apart."""
        runs, segment_slots = self.runs, self.store.arena.segment_slots
        front = runs.parents[run]
        if not front or runs.children[front] != 1 or not runs.same_mask(front, run):
            return
        start, first = runs.starts[run], runs.starts[front]
        if first + runs.lengths[front] != start or first // segment_slots != start // segment_slots:
            return
        self.store.own(run, first, start - first)
        self._heads.remove(run)
        self._heads.replace(front, run)
        runs.starts[run], runs.lengths[run], runs.parents[run] = (
            first,
            runs.lengths[run] + start - first,
            runs.parents[front],
        )
        runs.used[run] |= runs.used[front]
        if self._waiting:
            self._orphans.pass_on(front, run)
        runs.remove(front)

    def _merge_down(self, run: int) -> None:
        end = self.store.end(run)
        if self.runs.children[run] != 1 or end >= self.store.arena.top:
            return
        below = self.store.at(end)
        if below and self.runs.parents[below] == run:
            self._merge_up(below)

    def _parts(self, packed: bytes) -> Iterator[tuple[int, int, int]]:
        """(run, first place, end) of those of the blocks that are there; a part may be changed before the next."""
        runs = self.runs
        for slot, end in self.store.stretches(packed):
            while slot < end:
                run = self.store.at(slot)
                if not run:
                    slot += 1
                    continue
                first = runs.starts[run]
                start, stop = slot - first, min(end - first, runs.lengths[run])
                slot = first + stop
                yield run, start, stop

    def _part(self, run: int, start: int, stop: int) -> int:
        """A part of a run as a run of its own."""
        part = self._front(run, stop)
        if start > 0:
            self._front(part, start)
        return part

    def _clear_part(self, run: int, start: int, stop: int, bit: int) -> None:
        runs = self.runs
        if start > 0 and stop == runs.lengths[run] and runs.children[run] == 0 and runs.mask(run) == bit:
            self.store.arena.free(runs.starts[run] + start, stop - start)
            runs.lengths[run], runs.rooms[run] = start, 0
            return
        part = self._part(run, start, stop)
        runs.set_mask(part, runs.mask(part) & ~bit)
        self._tidy(part)

    def _tidy(self, run: int) -> None:
        """After a run lost holders: it, and those above that only waited for it, end; or it joins its neighbours."""
        runs, current = self.runs, run
        while current and not runs.mask(current) and not runs.children[current]:
            parent = runs.parents[current]
            self._end(current)
            current = parent
        if current:
            self._merge_down(current)
            if runs.lengths[current]:
                self._merge_up(current)

    def _end(self, run: int) -> None:
        runs = self.runs
        self._heads.remove(run)
        self.store.arena.free(runs.starts[run], runs.lengths[run])
        if parent := runs.parents[run]:
            runs.children[parent] -= 1
        if self._waiting:
            self._orphans.remove(run)
        runs.remove(run)

    def _adopt_orphans(self, run: int) -> None:
        """Hangs runs that came before their parent, the run's last block, below it."""
        for orphan in self._orphans.take(self.store.tail(run)):
            self.runs.parents[orphan] = run
            self.runs.children[run] += 1


def _holder_bits(bit: int) -> int:
    """The bits of all three tiers of the holder that has `bit`."""
    position = bit.bit_length() - 1
    return 7 << (position - position % 3)
