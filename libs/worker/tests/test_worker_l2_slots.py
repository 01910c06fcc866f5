"""L2's directory: slots are never shared, never lost, and leave from the ends of chains."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill_kvcache.runs import DroppedSnapshots, RemovedRun, StoredRun
from tidemill_worker.l2_slots import L2Block, L2Slots
from tidemill_worker.residents import StoredBlock

SLOTS, SNAPSHOTS = 6, 2


def block(name: int, *, parent: int = 0, snapshot: bool = False) -> StoredBlock:
    return StoredBlock(bytes([parent]) * 16 if parent else b"", bytes([name]) * 16, snapshot)


def put(slots: L2Slots, stored: StoredBlock) -> L2Block:
    made = slots.reserve(stored, with_snapshot=stored.has_snapshot)
    assert made is not None
    slots.filled(made)
    return made


def test_a_block_is_found_only_once_it_is_filled() -> None:
    slots = L2Slots(2, 0)
    made = slots.reserve(block(1), with_snapshot=False)
    assert made is not None
    assert slots.get(made.block_hash) is None
    assert not slots.lacks(block(1)), "it is on its way"
    slots.filled(made)
    assert slots.get(made.block_hash) is made


def test_chains_leave_from_their_ends_and_the_least_used_one_first() -> None:
    slots = L2Slots(4, 0)
    old = [put(slots, block(1)), put(slots, block(2, parent=1))]
    put(slots, block(3))
    put(slots, block(4, parent=3))
    slots.touch(old)
    for name in (5, 6, 7):
        put(slots, block(name))
    present = {name for name in range(1, 8) if slots.get(bytes([name]) * 16)}
    assert present == {1, 5, 6, 7}


def test_what_is_being_read_keeps_its_slot_until_it_has_been_read() -> None:
    slots = L2Slots(1, 0)
    read = put(slots, block(1))
    slots.pin([read])
    assert slots.reserve(block(2), with_snapshot=False) is None
    slots.clear()
    assert slots.reserve(block(2), with_snapshot=False) is None, "a reader still copies from the slot"
    slots.unpin([read])
    assert slots.reserve(block(2), with_snapshot=False) is not None


def test_a_block_is_stored_with_its_snapshot_or_not_at_all() -> None:
    slots = L2Slots(4, 1)
    first = put(slots, block(1, snapshot=True))
    slots.pin([first])
    assert slots.reserve(block(2, snapshot=True), with_snapshot=True) is None
    slots.unpin([first])
    put(slots, block(2, snapshot=True))
    assert first.snapshot_slot < 0, "the older block stays, as one that ends nowhere"
    assert slots.lacks(block(1, snapshot=True))
    assert not slots.lacks(block(1))


def test_a_fill_that_ends_after_a_reset_is_not_found() -> None:
    slots = L2Slots(2, 0)
    made = slots.reserve(block(1), with_snapshot=False)
    assert made is not None
    slots.clear()
    again = slots.reserve(block(1), with_snapshot=False)
    assert again is not None
    slots.filled(made)
    assert slots.get(made.block_hash) is None
    slots.filled(again)
    assert slots.get(made.block_hash) is again


class Slots(RuleBasedStateMachine):
    """Any order of calls, beside what the events tell."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = L2Slots(SLOTS, SNAPSHOTS)
        self.filling: list[L2Block] = []
        self.reading: list[L2Block] = []
        self.told: set[bytes] = set()
        self.told_snapshots: set[bytes] = set()

    @rule(name=st.integers(1, 12), parent=st.integers(0, 12), snapshot=st.booleans())
    def reserve(self, name: int, parent: int, snapshot: bool) -> None:
        stored = block(name, parent=parent, snapshot=snapshot)
        if not self.slots.lacks(stored):
            return
        made = self.slots.reserve(stored, with_snapshot=snapshot)
        if made is not None:
            self.filling.append(made)

    @precondition(lambda self: self.filling)
    @rule(index=st.integers(0, 11), good=st.booleans())
    def end_fill(self, index: int, good: bool) -> None:
        made = self.filling.pop(index % len(self.filling))
        (self.slots.filled if good else self.slots.failed)(made)

    @rule(name=st.integers(1, 12))
    def read(self, name: int) -> None:
        found = self.slots.get(bytes([name]) * 16)
        if found is not None:
            self.slots.pin([found])
            self.slots.touch([found])
            self.reading.append(found)

    @precondition(lambda self: self.reading)
    @rule(index=st.integers(0, 11))
    def end_read(self, index: int) -> None:
        self.slots.unpin([self.reading.pop(index % len(self.reading))])

    @rule(name=st.integers(1, 12))
    def damage(self, name: int) -> None:
        found = self.slots.get(bytes([name]) * 16)
        if found is not None:
            self.slots.drop(found)

    @rule()
    def clear(self) -> None:
        self.slots.clear()
        self.told.clear()
        self.told_snapshots.clear()

    @invariant()
    def slots_have_one_owner(self) -> None:
        owners = {id(b): b for b in (*self.slots._blocks.values(), *self.filling, *self.reading)}.values()
        used = [b.slot for b in owners]
        assert sorted(used + self.slots._free) == list(range(SLOTS))
        snapshots = [b.snapshot_slot for b in owners if b.snapshot_slot >= 0]
        assert sorted(snapshots + self.slots._free_snapshots) == list(range(SNAPSHOTS))

    @invariant()
    def events_tell_what_is_there(self) -> None:
        for event in self.slots.take_events():
            if isinstance(event, StoredRun):
                self.told |= set(event.hashes)
                self.told_snapshots |= {h for h, has in zip(event.hashes, event.has_snapshot, strict=True) if has}
            elif isinstance(event, RemovedRun):
                self.told -= set(event.hashes)
                self.told_snapshots -= set(event.hashes)
            elif isinstance(event, DroppedSnapshots):
                self.told_snapshots -= set(event.hashes)
        held = self.slots._blocks
        assert self.told == set(held)
        assert self.told_snapshots == {h for h, there in held.items() if there.snapshot_slot >= 0}

    @invariant()
    def what_would_be_evicted_next_is_told_in_order(self) -> None:
        told = [block.block_hash for block in self.slots.coldest(SLOTS)]
        twin, evicted = copy.deepcopy(self.slots), []
        there = set(twin._blocks)
        while twin._evict():
            evicted += there - set(twin._blocks)
            there = set(twin._blocks)
        assert told == evicted
        assert [block.block_hash for block in self.slots.coldest(2)] == told[:2]


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
