"""Models with per-sequence state reuse a prefix only where a snapshot of that state exists."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import chain_root
from tidemill_kvcache.runs import CacheEvent, Cleared, RemovedRun, StoredRun
from tidemill_kvcache.sequence import CachedSequence

ROOT = chain_root(b"model", b"")
IDS = np.arange(40, dtype=np.uint32)


def make(num_snapshots: int = 4, num_blocks: int = 16) -> PrefixCache:
    """Blocks of 4 tokens, a snapshot each 8."""
    return PrefixCache(num_blocks, 4, num_snapshots=num_snapshots, snapshot_interval_tokens=8)


def compute(cache: PrefixCache, num_tokens: int, boundaries: tuple[int, ...], first: int = 0) -> CachedSequence:
    seq = cache.open(ROOT)
    ids = IDS + first
    assert cache.allocate(seq, num_tokens) is not None
    for boundary in boundaries:
        assert cache.store_snapshot(seq, boundary) is not None
        cache.commit(seq, ids, boundary)
    cache.commit(seq, ids, num_tokens)
    return seq


def test_a_match_ends_at_the_deepest_boundary_with_a_snapshot() -> None:
    cache = make()
    compute(cache, 24, (8, 16))
    seq = cache.open(ROOT)
    match = cache.match_prefix(seq, IDS, 23)
    assert (match.num_tokens, match.num_blocks) == (16, 4)
    assert match.snapshot_id >= 0
    assert cache.match_prefix(cache.open(ROOT), IDS, 15).num_tokens == 8
    assert cache.match_prefix(cache.open(ROOT), IDS + 1, 23).num_tokens == 0


def test_state_that_comes_another_way_needs_no_snapshot() -> None:
    cache = make()
    compute(cache, 24, ())
    match = cache.match_prefix(cache.open(ROOT), IDS, 24, need_snapshot=False)
    assert (match.num_tokens, match.snapshot_id) == (24, -1)
    assert cache.match_prefix(cache.open(ROOT), IDS, 24).num_tokens == 0


def test_a_matched_snapshot_is_not_reused_until_released() -> None:
    cache = make(num_snapshots=1)
    cache.free(compute(cache, 12, (8,)))
    seq = cache.open(ROOT)
    match = cache.match_prefix(seq, IDS, 12)
    other = cache.open(ROOT)
    assert cache.allocate(other, 8) is not None
    assert cache.store_snapshot(other, 8) is None
    cache.release_snapshot(seq)
    cache.release_snapshot(seq)
    assert cache.store_snapshot(other, 8) == match.snapshot_id
    assert cache.match_prefix(cache.open(ROOT), IDS, 12).num_tokens == 0


def test_the_least_recently_used_snapshot_leaves_first_and_its_blocks_stay() -> None:
    cache = make(num_snapshots=2)
    first = compute(cache, 16, (8, 16))
    cache.free(first)
    assert cache.match_prefix(first, IDS, 16).num_tokens == 16
    cache.free(first)
    other = compute(cache, 8, (8,), first=100)
    assert cache.match_prefix(cache.open(ROOT), IDS, 16).num_tokens == 16
    assert cache.match_prefix(cache.open(ROOT), IDS, 12).num_tokens == 0
    assert cache.cached_blocks == 6
    assert cache.match_prefix(cache.open(ROOT), IDS + 100, 8).num_tokens == 8
    cache.free(other)
    cache.check_invariants()


def test_an_evicted_block_frees_its_snapshot() -> None:
    cache = make(num_snapshots=1, num_blocks=4)
    cache.free(compute(cache, 8, (8,)))
    big = cache.open(ROOT)
    assert cache.allocate(big, 16) is not None
    assert cache.store_snapshot(big, 16) == 0
    cache.free(big)
    assert cache.used_snapshots == 0
    cache.check_invariants()


def test_a_sequence_freed_before_its_commit_gives_its_snapshot_back() -> None:
    cache = make(num_snapshots=1)
    seq = cache.open(ROOT)
    assert cache.allocate(seq, 8) is not None
    assert cache.store_snapshot(seq, 8) == 0
    assert cache.store_snapshot(seq, 8) == 0
    assert cache.used_snapshots == 1
    cache.free(seq)
    assert cache.used_snapshots == 0
    cache.check_invariants()


def test_a_boundary_beyond_the_blocks_gets_no_snapshot() -> None:
    cache = make()
    seq = cache.open(ROOT)
    assert cache.allocate(seq, 8) is not None
    assert cache.store_snapshot(seq, 16) is None
    assert cache.store_snapshot(seq, 0) is None


def test_a_snapshot_added_to_a_cached_block_is_announced() -> None:
    cache = make()
    first = compute(cache, 8, ())
    cache.take_events()
    second = cache.open(ROOT)
    assert cache.allocate(second, 8) is not None
    assert cache.store_snapshot(second, 8) is not None
    cache.commit(second, IDS, 8)
    assert cache.take_events() == [StoredRun(first.hashes[0], [first.hashes[1]], [True])]
    assert cache.match_prefix(cache.open(ROOT), IDS, 12).num_tokens == 8


def test_onboarding_keeps_only_the_snapshots_that_were_filled() -> None:
    cache = make()
    seq = cache.open(ROOT)
    assert cache.allocate(seq, 24) is not None
    assert cache.store_snapshot(seq, 8) is not None
    wanted = cache.store_snapshot(seq, 16)
    assert cache.store_snapshot(seq, 24) is not None
    cache.discard_snapshot(seq, 8)
    cache.discard_snapshot(seq, 8)
    cache.adopt(seq, 4, IDS)
    assert cache.used_snapshots == 0
    assert cache.hold_snapshot(seq) == wanted
    assert cache.used_snapshots == 1
    assert cache.match_prefix(cache.open(ROOT), IDS, 12).num_tokens == 0
    cache.commit(seq, IDS, 24)
    assert cache.used_snapshots == 0
    cache.free(seq)
    cache.check_invariants()


def test_pins_keep_snapshots() -> None:
    cache = make(num_snapshots=1)
    seq = compute(cache, 8, (8,))
    assert cache.pin(1, seq.hashes) == (seq.block_ids, [-1, 0])
    cache.free(seq)
    other = cache.open(ROOT)
    assert cache.allocate(other, 8) is not None
    assert cache.store_snapshot(other, 8) is None
    cache.unpin(1)
    assert cache.store_snapshot(other, 8) == 0
    cache.check_invariants()


def test_a_reset_does_not_lose_snapshots() -> None:
    cache = make(num_snapshots=2)
    seq = compute(cache, 16, (8,))
    assert cache.store_snapshot(seq, 16) is not None
    cache.reset()
    cache.check_invariants()
    assert cache.store_snapshot(seq, 16) is None
    cache.free(seq)
    cache.check_invariants()
    assert cache.free_blocks == 16


@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), min_size=5, max_size=40))
@settings(max_examples=150, deadline=None)
def test_events_tell_of_each_snapshot_that_comes_and_goes(steps: list[tuple[int, int, int]]) -> None:
    """Prompts that share beginnings meet too few blocks and snapshots; what was told is what the cache has."""
    cache, blocks, snapshots = make(num_snapshots=3, num_blocks=12), set[bytes](), set[bytes]()
    live: list[CachedSequence] = []
    for prompt, num_blocks, choice in steps:
        ids = np.concatenate((IDS[: 4 * (prompt % 3) * 2], IDS + 100 * prompt))[: 4 * num_blocks]
        if choice == 0:
            cache.reset()
        elif choice < 4 and live:
            cache.free(live.pop(prompt % len(live)))
        else:
            seq = cache.open(ROOT)
            start = cache.match_prefix(seq, ids, len(ids)).num_tokens
            if cache.allocate(seq, len(ids)) is None:
                cache.free(seq)
                continue
            live.append(seq)
            for boundary in range(start // 8 * 8 + 8, len(ids) + 1, 8):
                if boundary // 4 % 3 != choice % 3:
                    cache.store_snapshot(seq, boundary)
                cache.commit(seq, ids, boundary)
            cache.commit(seq, ids, len(ids))
        follow(cache.take_events(), blocks, snapshots)
        held = [pair for run in cache.snapshot_blocks() for pair in zip(run.hashes, run.has_snapshot, strict=True)]
        assert blocks == {block_hash for block_hash, _ in held}
        assert snapshots == {block_hash for block_hash, has_snapshot in held if has_snapshot}
        cache.check_invariants()


def follow(events: list[CacheEvent], blocks: set[bytes], snapshots: set[bytes]) -> None:
    """What a mirror does with events."""
    for event in events:
        if isinstance(event, Cleared):
            blocks.clear()
            snapshots.clear()
        elif isinstance(event, StoredRun):
            blocks.update(event.hashes)
            snapshots.update(h for h, has in zip(event.hashes, event.has_snapshot, strict=True) if has)
        elif isinstance(event, RemovedRun):
            blocks.difference_update(event.hashes)
            snapshots.difference_update(event.hashes)
        else:
            assert snapshots.issuperset(event.hashes), "a snapshot left that was never told of, or twice"
            snapshots.difference_update(event.hashes)
