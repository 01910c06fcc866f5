"""Runs are found by their first hash while runs come, go, split and join, in a table that grows and shrinks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache import head_table
from tidemill_kvcache.arena import HashArena
from tidemill_kvcache.head_table import HeadTable
from tidemill_kvcache.run_table import RunTable

SLOTS = 256

steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "remove", "replace"]), st.integers(0, 1 << 16)), max_size=150
)


@given(steps=steps, spread=st.sampled_from([1, 4, 256]))
@settings(max_examples=60, deadline=None)
def test_the_table_equals_a_dictionary_of_first_hashes(steps: list[tuple[str, int]], spread: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_table, "MIN_PLACES", 4)
        rng = np.random.default_rng(spread)
        arena, runs = HashArena(SLOTS), RunTable()
        # Hashes that begin alike want the same place; the last ones go on at the table's beginning.
        hashes = [
            rng.bytes(4) + bytes([255, 255, 255, 255 - int(rng.integers(spread))]) + rng.bytes(8) for _ in range(SLOTS)
        ]
        first = arena.reserve(arena.room(SLOTS, least=SLOTS))
        arena.fill(first, b"".join(hashes), owner=1)
        table = HeadTable(arena, runs)
        model: dict[bytes, int] = {}
        for kind, number in steps:
            slot = number % SLOTS
            if kind == "add" and hashes[slot] not in model:
                model[hashes[slot]] = run = runs.add(first + slot, 1, 0, 1)
                table.add(run)
            elif kind == "remove" and model:
                run = model.pop(sorted(model)[number % len(model)])
                table.remove(run)
                runs.remove(run)
            elif kind == "replace" and model:
                head = sorted(model)[number % len(model)]
                old, model[head] = model[head], runs.add(runs.starts[model[head]], 1, 0, 1)
                table.replace(old, model[head])
                runs.remove(old)
        table.check_invariants()
        assert len(table) == len(model) == runs.live
        assert [table.find(block_hash) for block_hash in hashes] == [model.get(block_hash, 0) for block_hash in hashes]
