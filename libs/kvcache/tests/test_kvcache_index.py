"""The index answers who holds how much of a prompt, within its bound."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import CHUNK_ENTRIES, ENTRY_BYTES, L1, L2, L3, BlockIndex, TierDepth

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
    index.removed(A, hashes, L1)
    assert index.num_blocks == 0


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
    index.stage(A, new[:2], L1)
    index.stage(A, new[2:], L1)
    assert index.match(old) == {A: TierDepth(l1=2)}
    assert index.match(new) == {}
    index.publish(A)
    assert index.match(old) == {}
    assert index.match(new) == {A: TierDepth(l1=3)}
    index.stage(A, old, L1)
    index.discard_staged(A)
    assert index.num_blocks == 3


def test_the_bound_holds_and_used_prefixes_stay() -> None:
    limit = 20 * CHUNK_ENTRIES
    index = BlockIndex(limit * ENTRY_BYTES)
    hot = prompt(*range(100))
    index.stored(A, b"", hot, L1)
    for conversation in range(400):
        index.stored(A, b"", prompt(*range(1000 * conversation + 1000, 1000 * conversation + 1100)), L1)
        index.touch(A, hot)
        assert index.bytes_used <= index.max_bytes
    assert index.match(hot) == {A: TierDepth(l1=100)}
    assert index.evicted_blocks >= 400 * 100 + 100 - limit
    assert index.match(prompt(*range(1000, 1100))) == {}


def test_published_bytes_are_no_less_than_the_memory_taken() -> None:
    hashes = [prompt(*range(i, i + 128)) for i in range(0, 128 * 500, 128)]
    packed = [b"".join(run) for run in hashes]
    del hashes
    index = BlockIndex(1 << 30)
    tracemalloc.start()
    try:
        for run in packed:
            index.stored(A, b"", [run[i : i + 16] for i in range(0, len(run), 16)], L1)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= index.bytes_used


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["stored", "removed", "drop", "touch"]), st.sampled_from([A, B]), paths))


@given(steps=steps, query=paths)
def test_the_index_equals_a_set_of_paths_for_each_holder(
    steps: list[tuple[str, tuple[str, int], tuple[int, ...]]], query: tuple[int, ...]
) -> None:
    index = BlockIndex(200 * ENTRY_BYTES)
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
