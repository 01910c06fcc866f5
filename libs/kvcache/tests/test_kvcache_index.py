"""The index answers who holds how much of a prompt, within its bound."""

import random
import tracemalloc
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_kvcache.arena import HUGE_PAGE_BYTES, SLOT_BYTES, HashArena
from tidemill_kvcache.hashing import chain_root, hash_blocks, split_hashes
from tidemill_kvcache.index import L1, L2, L3, BlockIndex, TierDepth
from tidemill_kvcache.run_store import RunStore

ROOT = chain_root(b"model", b"")
A, B = ("a", 0), ("b", 1)


def prompt(*values: int) -> list[bytes]:
    """Hashes of one-token blocks."""
    return hash_blocks(ROOT, values, 1)


def test_depth_is_counted_per_holder() -> None:
    index = BlockIndex(1 << 20)
    hashes = prompt(1, 2, 3, 4)
    index.stored(A, b"", hashes[:3], L1)
    index.stored(B, b"", hashes[:1], L1)
    assert index.match(hashes) == {A: TierDepth(l1=3), B: TierDepth(l1=1)}
    assert index.match(prompt(9, 2, 3)) == {}
    assert index.match([]) == {}


def test_lower_tiers_count_after_the_upper_ones_and_stop_at_a_hole() -> None:
    index = BlockIndex(1 << 20)
    hashes = prompt(*range(10))
    index.stored(A, b"", hashes[:2], L1)
    index.stored(A, b"", hashes[:4], L2)
    index.stored(A, hashes[3], hashes[4:6], L3)
    index.stored("store", b"", hashes, L3)
    index.removed("store", hashes[5:6], L3)
    assert index.match(hashes) == {A: TierDepth(2, 2, 2), "store": TierDepth(l3=5)}


def test_removed_and_dropped_blocks_no_longer_count() -> None:
    index = BlockIndex(1 << 20)
    hashes = prompt(*range(5))
    index.stored(A, b"", hashes, L1)
    index.stored(B, b"", hashes, L1)
    index.removed(A, hashes[2:], L1)
    index.removed(A, prompt(77), L1)
    assert index.match(hashes)[A].l1 == 2
    index.drop(B)
    index.drop(B)
    assert index.match(hashes) == {A: TierDepth(l1=2)}
    assert (index.num_blocks, index.blocks_of(A), index.blocks_of(B)) == (2, 2, 0)


def test_storing_again_changes_nothing() -> None:
    index = BlockIndex(1 << 20)
    hashes = prompt(*range(5))
    index.stored(A, b"", hashes, L1)
    index.stored(A, hashes[1], hashes[2:], L1)
    index.stored(A, b"", [*hashes, hashes[0]], L1)
    assert (index.num_blocks, index.hashes_of(A, L1)) == (5, set(hashes))
    index.stored(A, hashes[-1], b"", L1)
    index.removed(A, b"", L1)
    assert index.num_blocks == 5
    index.removed(A, hashes, L1)
    assert index.num_blocks == 0
    index.check_invariants()


def test_a_run_with_an_unknown_parent_is_kept_and_counted() -> None:
    index = BlockIndex(1 << 20)
    hashes = prompt(1, 2, 3)
    index.stored(A, hashes[0], hashes[1:], L1)
    assert index.orphan_runs == 1
    index.stored(A, b"", hashes[:1], L1)
    assert index.match(hashes) == {A: TierDepth(l1=3)}


def test_a_staged_list_replaces_the_old_one_at_once() -> None:
    index = BlockIndex(1 << 20)
    old, new = prompt(1, 2), prompt(3, 4, 5)
    index.stored(A, b"", old, L1)
    index.stage(A, b"", new[:2], L1)
    index.stage(A, new[1], new[2:], L1)
    assert index.match(old) == {A: TierDepth(l1=2)}
    assert index.match(new) == {}
    index.publish(A)
    assert index.match(old) == {}
    assert index.match(new) == {A: TierDepth(l1=3)}
    index.stage(A, b"", old, L1)
    index.discard_staged(A)
    assert index.num_blocks == 3


def test_the_bound_holds_and_used_prefixes_stay() -> None:
    index = BlockIndex(400_000)
    hot = prompt(*range(100))
    index.stored(A, b"", hot, L1)
    for conversation in range(400):
        index.stored(A, b"", prompt(*range(1000 * conversation + 1000, 1000 * conversation + 1100)), L1)
        index.touch(A, hot)
        assert index.bytes_used <= index.max_bytes
    assert index.match(hot) == {A: TierDepth(l1=100)}
    assert index.evicted_blocks == 400 * 100 + 100 - index.num_blocks
    assert index.num_blocks > 3000
    assert index.match(prompt(*range(1000, 1100))) == {}


@pytest.mark.parametrize(("length", "count"), [(1, 6000), (3, 3000), (128, 200)])
def test_published_bytes_are_no_less_than_the_memory_taken(length: int, count: int) -> None:
    rng = np.random.default_rng(length)
    runs = [rng.bytes(16 * length) for _ in range(count)]
    tracemalloc.start()
    try:
        index = BlockIndex(1 << 30)
        for number, run in enumerate(runs):
            index.stored(("worker", number % 64), b"", run, L1)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The arena's mappings are not traced; each used slot of theirs takes 20 bytes.
    assert taken + length * count * SLOT_BYTES <= index.bytes_used


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (1, 1), (2, 0), (5, 1)])
def test_a_block_of_many_short_prompts_takes_at_most_64_bytes(length: int, shared: int) -> None:
    rng = np.random.default_rng(length)
    index = BlockIndex(1 << 28)
    start = rng.bytes(16 * shared)
    for number in range(8_000 // length):
        index.stored(("worker", number % 16), b"", start + rng.bytes(16 * length), L1)
    index.settle()
    assert index.bytes_used <= 64 * index.distinct_blocks


@pytest.mark.parametrize("stores", [2, 8])
def test_a_block_of_prompts_that_stores_share_by_their_hashes_takes_at_most_64_bytes(stores: int) -> None:
    index, rng = BlockIndex(1 << 30), np.random.default_rng(1)
    for _ in range(50):
        hashes = split_hashes(rng.bytes(16 * 400))
        store_of = [block_hash[0] % stores for block_hash in hashes]
        starts = [0, *(i for i in range(1, 400) if store_of[i] != store_of[i - 1]), 400]
        for start, end in pairwise(starts):
            index.stored(f"store-{store_of[start]}", hashes[start - 1] if start else b"", hashes[start:end], L3)
        names = [f"store-{number}" for number in range(stores)]
        assert index.leading(index.find(hashes), names, L3) == 400
    assert index.bytes_used <= 64 * index.distinct_blocks


def test_a_block_of_ordinary_prompts_takes_at_most_64_bytes() -> None:
    rng = np.random.default_rng(0)
    index = BlockIndex(1 << 28)
    for group in range(40):
        shared = rng.bytes(16 * 64)
        for number in range(25):
            index.stored(("worker", (group + number) % 16), b"", shared + rng.bytes(16 * 48), L1)
    distinct = 40 * (64 + 25 * 48)
    assert index.num_blocks > distinct
    assert index.bytes_used <= 64 * distinct


def test_long_prompts_are_whole_when_the_arena_has_grown_to_huge_pages() -> None:
    rng = np.random.default_rng(3)
    index = BlockIndex(1 << 30)
    prompts = [rng.bytes(16 * 4096) for _ in range(100)]
    for number, packed in enumerate(prompts):
        index.stored(number, b"", packed, L1)
    assert all(index.match(packed) == {number: TierDepth(l1=4096)} for number, packed in enumerate(prompts))
    for number, packed in enumerate(prompts[:90]):
        index.removed(number, packed, L1)
    assert index.num_blocks == 10 * 4096
    assert index.bytes_used < 64 * (index.num_blocks + 2 * 16384) + 2 * HUGE_PAGE_BYTES
    index.check_invariants()


@pytest.mark.full
def test_the_bound_holds_after_each_event_where_it_is_not_looked_at_each_time() -> None:
    rng = np.random.default_rng(4)
    index = BlockIndex(7_000_000)
    shared = [rng.bytes(16 * 20) for _ in range(50)]
    most = 0
    for number in range(110_000):
        packed = rng.bytes(16) if number % 8 else shared[number % 50] + rng.bytes(16 * (number % 30))
        index.stored(number % 40, b"", packed, L1)
        most = max(most, index.bytes_used)
    assert index.evicted_blocks > 0
    assert 0.7 * index.max_bytes < most <= index.max_bytes
    index.check_invariants()


def test_the_arena_grows_while_somebody_looks_at_it() -> None:
    arena = HashArena(256)
    first = np.random.default_rng(0).bytes(16 * 256)
    arena.fill(arena.reserve(arena.room(256)), first, owner=7)
    seen = arena.words
    arena.fill(arena.reserve(arena.room(256)), first, owner=8)
    assert arena.packed(0, 512) == first * 2
    assert (arena.owners[:256] == 7).all()
    assert seen.tobytes() == first


def test_memory_stays_bounded_and_small_while_blocks_come_and_go() -> None:
    rng = np.random.default_rng(1)
    index = BlockIndex(1 << 28, segment_slots=256)
    live: deque[tuple[int, bytes]] = deque()
    for number in range(1000):
        packed = rng.bytes(16 * int(rng.integers(20, 60)))
        index.stored(number % 8, b"", packed[:320], L1)
        for at in range(320, len(packed), 16):
            index.stored(number % 8, packed[at - 16 : at], packed[at : at + 16], L1)
        live.append((number % 8, packed))
        if len(live) > 200:
            holder, old = live.popleft()
            for end in range(len(old), 0, -48):
                index.removed(holder, old[max(0, end - 48) : end], L1)
    assert index.num_blocks == sum(len(packed) for _, packed in live) // 16
    assert index.bytes_used < 100 * index.num_blocks
    index.check_invariants()


def test_dead_entries_are_swept_out_of_the_table() -> None:
    rng = np.random.default_rng(2)
    store = RunStore(4096)
    live: deque[int] = deque()
    for _ in range(600):
        start = store.arena.reserve(store.arena.room(256, least=256))
        run = store.runs.add(start, 256, 0, 1)
        store.write(run, start, rng.bytes(16 * 256))
        store.heads.add(run)
        live.append(run)
        if len(live) > 8:
            gone = live.popleft()
            store.heads.remove(gone)
            store.arena.free(store.runs.starts[gone], store.runs.lengths[gone])
            store.runs.remove(gone)
        store.take_in()
    store.check_invariants()
    assert store.table.size <= store.table.max_size + store.arena.live_slots + 2 * 4096
    assert all(store.locate(store.head(run)) == (run, 0) for run in live)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["stored", "removed", "drop", "touch"]), st.sampled_from([A, B]), paths))


@given(steps=steps, query=paths)
def test_the_index_equals_a_set_of_paths_for_each_holder(
    steps: list[tuple[str, tuple[str, int], tuple[int, ...]]], query: tuple[int, ...]
) -> None:
    index = BlockIndex(1 << 16)
    model: dict[tuple[str, int], set[tuple[int, ...]]] = {A: set(), B: set()}
    for kind, holder, path in steps:
        if kind == "stored":
            index.stored(holder, b"", prompt(*path), L1)
            model[holder].update(path[:end] for end in range(1, len(path) + 1))
        elif kind == "removed":
            gone = [p for p in model[holder] if p[: len(path)] == path]
            index.removed(holder, [prompt(*p)[-1] for p in gone], L1)
            model[holder].difference_update(gone)
        elif kind == "drop":
            index.drop(holder)
            model[holder].clear()
        else:
            index.touch(holder, prompt(*path))
    for holder, held in model.items():
        assert index.hashes_of(holder, L1) == {prompt(*p)[-1] for p in held}
        depth = index.match(prompt(*query)).get(holder, TierDepth())
        assert depth.l1 == sum(query[:end] in held for end in range(1, len(query) + 1))
    assert index.num_blocks == sum(map(len, model.values()))


@pytest.mark.parametrize("every", [1, 2, 4])
def test_snapshots_stay_within_the_bytes_of_a_block(every: int) -> None:
    """Each of them parts a run in two; a model without them has none to pay for."""
    rng, index = random.Random(every), BlockIndex(1 << 28)
    for _ in range(100):
        hashes, parent = [rng.randbytes(16) for _ in range(512)], b""
        for start in range(0, 512, 16):
            part = hashes[start : start + 16]
            index.stored(A, parent, part, L1)
            index.mark("of A", part[every - 1 :: every][::-1], L1)
            parent = part[-1]
    index.settle()
    assert index.distinct_blocks == 51_200
    assert index.blocks_of("of A") == 51_200 // every
    assert index.bytes_used <= 64 * index.distinct_blocks + 2 * HUGE_PAGE_BYTES
