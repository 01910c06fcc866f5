"""The table of hashes answers as a dictionary does, whatever is freed and used again, and keeps few dead keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache import slot_table
from tidemill_kvcache.arena import HashArena, as_words
from tidemill_kvcache.slot_table import SlotTable

SEGMENT = 256

steps = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), st.integers(1, 40)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16)),
        st.tuples(st.just("again"), st.integers(0, 1 << 16)),
        st.tuples(st.just("sweep"), st.just(0)),
    ),
    min_size=5,
    max_size=60,
)


class Filled:
    """An arena whose filled slots are known by hash, beside the table under test."""

    def __init__(self) -> None:
        self.arena = HashArena(SEGMENT)
        self.table = SlotTable(self.arena)
        self.slots: dict[bytes, int] = {}
        self.gone: list[bytes] = []
        self.pending: list[int] = []
        self._rng = np.random.default_rng(0)

    def fill(self, hashes: list[bytes]) -> None:
        start = self.arena.reserve(self.arena.room(len(hashes), least=len(hashes)))
        self.arena.fill(start, b"".join(hashes), owner=1)
        for slot, block_hash in enumerate(hashes, start):
            self.slots[block_hash] = slot
            self.pending.append(slot)

    def new(self, count: int) -> list[bytes]:
        # Few upper halves, so that different hashes often have the same key.
        return [
            self._rng.bytes(4) + bytes([int(self._rng.integers(12))] * 4) + self._rng.bytes(8) for _ in range(count)
        ]

    def flush(self) -> None:
        if self.pending:
            self.table.insert(self.pending, [slot + 1 for slot in self.pending])
            self.pending = []

    def free(self, block_hash: bytes) -> None:
        self.arena.free(self.slots.pop(block_hash), 1)
        self.gone.append(block_hash)

    def random(self, count: int) -> list[bytes]:
        return [self._rng.bytes(16) for _ in range(count)]

    def check(self) -> None:
        self.flush()
        self.table.check_invariants()
        asked = [*self.slots, *(h for h in self.gone if h not in self.slots), *self.new(3)]
        wanted = [self.slots.get(block_hash, -1) for block_hash in asked]
        assert self.table.find_all(as_words(b"".join(asked))).tolist() == wanted
        assert [self.table.find(block_hash) for block_hash in asked] == wanted
        self.table.check_invariants()


@given(steps=steps)
@settings(max_examples=60, deadline=None)
def test_the_table_equals_a_dictionary(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FRESH_KEYS": 24, "PART_KEYS": 32, "DEAD_SLACK": 16, "MAX_PASSED": 3}.items():
            patch.setattr(slot_table, name, value)
        filled = Filled()
        for kind, number in steps:
            if kind == "fill":
                filled.fill(filled.new(number))
            elif kind == "again" and filled.gone:
                filled.fill([filled.gone.pop(number % len(filled.gone))])
            elif kind == "free" and filled.slots:
                filled.free(sorted(filled.slots)[number % len(filled.slots)])
            elif kind == "sweep":
                filled.table.sweep()
            else:
                filled.flush()
        filled.check()


def test_a_block_that_comes_and_goes_is_found_without_passing_over_its_past() -> None:
    filled = Filled()
    [block_hash] = filled.new(1)
    others = filled.random(20_000)
    for at in range(0, len(others), SEGMENT):
        filled.fill(others[at : at + SEGMENT])
    for _ in range(2000):
        filled.fill([block_hash])
        filled.free(block_hash)
    filled.fill([block_hash])
    filled.flush()
    before = filled.table.size
    assert filled.table.find(block_hash) == filled.slots[block_hash]
    assert filled.table.size <= before - 1900


def test_an_insert_works_on_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_table, "FRESH_KEYS", 256)
    monkeypatch.setattr(slot_table, "PART_KEYS", 512)
    worked: list[int] = []
    merged = slot_table._merged

    def counted(arrays: list[slot_table.Keys]) -> slot_table.Keys:
        worked[-1] += sum(map(len, arrays))
        return merged(arrays)

    monkeypatch.setattr(slot_table, "_merged", counted)
    filled = Filled()
    for _ in range(200):
        worked.append(0)
        filled.fill(filled.random(SEGMENT))
        filled.flush()
    assert sum(worked) < 8 * 200 * SEGMENT
    assert max(worked) < 16 * SEGMENT
    filled.table.check_invariants()
