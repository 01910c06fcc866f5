"""What a scheduler relies on when it uses a PrefixCache."""

from collections import Counter

import numpy as np
import pytest

from tidemill_kvcache import cache as cache_module
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import TokenIds, chain_root, hash_blocks
from tidemill_kvcache.prefix_tree import PrefixTree
from tidemill_kvcache.runs import Cleared, RemovedRun, StoredRun
from tidemill_kvcache.sequence import CachedSequence

ROOT = chain_root(b"model", b"")


def tokens(*parts: tuple[int, int]) -> TokenIds:
    """Concatenated (value, count) runs."""
    return np.concatenate([np.full(count, value, np.uint32) for value, count in parts])


def compute(cache: PrefixCache, ids: TokenIds, *, root: bytes = ROOT) -> CachedSequence:
    """Runs a whole prompt and leaves it open."""
    seq = cache.open(root)
    cache.match_prefix(seq, ids, len(ids) - 1)
    assert cache.allocate(seq, len(ids)) is not None
    cache.commit(seq, ids, len(ids))
    return seq


def test_a_second_request_reuses_full_blocks_but_not_the_last_token() -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(12, dtype=np.uint32)
    first = compute(cache, ids)
    second = cache.open(ROOT)
    match = cache.match_prefix(second, ids, len(ids) - 1)
    assert (match.num_tokens, match.num_blocks, match.snapshot_id) == (8, 2, -1)
    assert second.block_ids == first.block_ids[:2]
    assert cache.allocate(second, 12) is not None
    cache.check_invariants()


def test_a_match_resumes_where_another_request_has_gone_on() -> None:
    cache = PrefixCache(16, 4)
    ids = np.arange(16, dtype=np.uint32)
    writer, waiting = cache.open(ROOT), cache.open(ROOT)
    assert cache.allocate(writer, 16) is not None
    for computed in (4, 8, 16):
        cache.commit(writer, ids, computed)
        assert cache.match_prefix(waiting, ids, 15).num_tokens == min(computed, 12)
    assert waiting.block_ids == writer.block_ids[:3]
    assert waiting.num_cached_blocks == 3


def test_allocation_fails_whole_and_changes_nothing() -> None:
    cache = PrefixCache(4, 4)
    seq = compute(cache, np.arange(12, dtype=np.uint32))
    other = cache.open(ROOT)
    assert not cache.can_allocate(other, 8)
    assert cache.allocate(other, 8) is None
    assert cache.free_blocks == 1
    assert cache.can_allocate(other, 4)
    cache.free(seq)
    assert cache.can_allocate(other, 16)


def test_eviction_takes_the_deepest_block_of_the_oldest_request_first() -> None:
    cache = PrefixCache(6, 4)
    old, young = tokens((1, 12)), tokens((2, 12))
    old_seq = compute(cache, old)
    cache.free(old_seq)
    cache.free(compute(cache, young))
    cache.take_events()
    seq = cache.open(ROOT)
    assert cache.allocate(seq, 8) is not None
    assert cache.take_events() == [RemovedRun([old_seq.hash_chain[2], old_seq.hash_chain[1]])]
    again = cache.open(ROOT)
    assert cache.match_prefix(again, old, 12).num_blocks == 1
    assert cache.match_prefix(cache.open(ROOT), young, 12).num_blocks == 3


def test_background_work_does_not_push_out_what_others_use() -> None:
    cache = PrefixCache(6, 4)
    for priority, value in ((1, 1), (0, 2), (-5, 3)):
        seq = cache.open(ROOT, priority)
        assert cache.allocate(seq, 8) is not None
        cache.commit(seq, tokens((value, 8)), 8)
        cache.free(seq)
    left = []
    for needed in (8, 16, 24):
        seq = cache.open(ROOT, -1)
        assert cache.allocate(seq, needed) is not None
        cache.free(seq)
        left.append([cache.cached_depth(hash_blocks(ROOT, tokens((v, 8)), 4)) for v in (1, 2, 3)])
    assert left == [[2, 2, 0], [2, 0, 0], [0, 0, 0]]


def test_a_prefix_is_worth_what_its_worthiest_user_is() -> None:
    cache = PrefixCache(4, 4)
    shared = tokens((1, 8))
    cache.free(compute(cache, shared))
    kept = cache.open(ROOT, 1)
    assert cache.match_prefix(kept, shared, 4).num_blocks == 1
    cache.free(kept)
    other = cache.open(ROOT)
    assert cache.allocate(other, 12) is not None
    assert cache.match_prefix(cache.open(ROOT), shared, 8).num_blocks == 1
    cache.check_invariants()


def test_content_computed_twice_is_cached_once_and_nothing_leaks() -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(12, dtype=np.uint32)
    first, second = cache.open(ROOT), cache.open(ROOT)
    assert cache.allocate(first, 12) is not None
    assert cache.allocate(second, 12) is not None
    cache.commit(first, ids, 4)
    cache.commit(second, ids, 12)
    cache.commit(first, ids, 12)
    assert cache.cached_blocks == 3
    assert cache.used_blocks == 6
    cache.check_invariants()
    cache.free(second)
    cache.check_invariants()
    cache.free(first)
    assert (cache.used_blocks, cache.cached_blocks, cache.available_blocks) == (0, 3, 8)
    cache.check_invariants()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tokens hashed and blocks looked up in the tree, of all caches."""
    counted: Counter[str] = Counter()
    look_up = PrefixTree.get

    def hashing(parent: bytes, ids: TokenIds, block_size: int) -> list[bytes]:
        counted["tokens"] += len(ids)
        return hash_blocks(parent, ids, block_size)

    def looking_up(tree: PrefixTree, block_hash: bytes) -> object:
        counted["blocks"] += 1
        return look_up(tree, block_hash)

    monkeypatch.setattr(cache_module, "hash_blocks", hashing)
    monkeypatch.setattr(PrefixTree, "get", looking_up)
    return counted


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_a_prompt_in_chunks_costs_what_it_costs_in_one(chunk: int, work: Counter[str]) -> None:
    cache, ids = PrefixCache(64, 4), np.arange(256, dtype=np.uint32)
    shared = compute(cache, ids[:64])
    work.clear()
    seq = cache.open(ROOT)
    assert cache.match_prefix(seq, ids, 255).num_tokens == 64
    # Up to the first block that is not there; the chain of hashes is made at once.
    assert work == {"tokens": 252, "blocks": 17}
    cache.free(shared)
    for end in range(64 + chunk, 257, chunk):
        assert cache.allocate(seq, end) is not None
        cache.commit(seq, ids, end)
    assert work == {"tokens": 256, "blocks": 17 + 48}, "each token is hashed once, each block entered once"


def test_a_preempted_sequence_is_matched_again_without_hashing_anew(work: Counter[str]) -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(14, dtype=np.uint32)
    seq = compute(cache, ids)
    cache.free(seq)
    cache.free(seq)
    work.clear()
    assert cache.match_prefix(seq, ids, 13).num_blocks == 3
    assert work["tokens"] == 0
    cache.check_invariants()


def test_tenants_share_nothing() -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(8, dtype=np.uint32)
    compute(cache, ids)
    other = cache.open(chain_root(b"model", b"other tenant"))
    assert cache.match_prefix(other, ids, 8).num_blocks == 0


def test_events_rebuild_the_cached_set_and_the_dump_has_parents_first() -> None:
    cache = PrefixCache(16, 4)
    shared, left, right = tokens((1, 8)), tokens((1, 8), (2, 8)), tokens((1, 8), (3, 4))
    a = compute(cache, left)
    b = compute(cache, right)
    assert cache.take_events() == [
        StoredRun(b"", a.hashes, [False] * 4),
        StoredRun(a.hashes[1], b.hashes[2:], [False]),
    ]
    assert cache.take_events() == []
    assert cache.snapshot_blocks() == [
        StoredRun(b"", a.hashes, [False] * 4),
        StoredRun(a.hashes[1], b.hashes[2:], [False]),
    ]
    assert cache.lookup(a.hashes)[0] == a.block_ids
    assert cache.match_prefix(cache.open(ROOT), shared, 8).num_blocks == 2


def test_pinned_blocks_survive_pressure_and_return_after_it() -> None:
    cache = PrefixCache(6, 4)
    seq = compute(cache, tokens((1, 16)))
    hashes = list(seq.hashes)
    block_ids, snapshot_ids = cache.pin(7, [*hashes[1:3], b"\0" * 16])
    assert block_ids == seq.block_ids[1:3]
    assert snapshot_ids == [-1, -1]
    cache.free(seq)
    assert cache.pinned_blocks == 2
    other = cache.open(ROOT)
    assert cache.allocate(other, 16) is None
    assert cache.allocate(other, 12) is not None
    assert cache.lookup(hashes)[0] == [*cache.lookup(hashes[:1])[0], *block_ids]
    cache.free(other)
    cache.unpin(7)
    cache.unpin(7)
    assert (cache.pinned_blocks, cache.used_blocks) == (0, 0)
    cache.check_invariants()


def test_a_reset_forgets_blocks_in_use_too_but_frees_them_only_at_their_end() -> None:
    cache = PrefixCache(8, 4)
    done, live_ids = tokens((1, 8)), tokens((2, 12))
    cache.free(compute(cache, done))
    live = cache.open(ROOT)
    assert cache.allocate(live, 12) is not None
    cache.commit(live, live_ids, 8)
    assert cache.reset() == 4
    assert cache.take_events() == [Cleared()]
    assert (cache.cached_blocks, cache.used_blocks) == (0, 3)
    cache.commit(live, live_ids, 12)
    assert cache.take_events() == []
    assert cache.match_prefix(cache.open(ROOT), live_ids, 12).num_blocks == 0
    cache.check_invariants()
    cache.free(live)
    assert cache.free_blocks == 8
    cache.check_invariants()
    assert cache.match_prefix(live, live_ids, 12).num_blocks == 0
    cache.free(compute(cache, live_ids))
    assert cache.cached_blocks == 3


def test_adopted_blocks_can_be_matched_by_others() -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(14, dtype=np.uint32)
    seq = cache.open(ROOT)
    cache.match_prefix(seq, ids, 13)
    assert cache.allocate(seq, 14) is not None
    cache.adopt(seq, 2, ids)
    assert len(seq.hashes) == 2
    assert seq.num_cached_blocks == 0
    assert cache.match_prefix(cache.open(ROOT), ids, 13).num_blocks == 2


def test_what_a_sequence_keeps_private_is_found_by_nobody_until_it_is_computed_again() -> None:
    cache = PrefixCache(16, 4, num_snapshots=4, snapshot_interval_tokens=4)
    ids = np.arange(24, dtype=np.uint32)
    cache.free(compute(cache, ids[:8]))
    cache.take_events()
    seq = cache.open(ROOT)
    assert cache.match_prefix(seq, ids, 23, need_snapshot=False).num_blocks == 2
    assert cache.allocate(seq, 24) is not None
    assert cache.store_snapshot(seq, 12) is not None
    cache.keep_private(seq)
    assert cache.store_snapshot(seq, 16) is None
    cache.adopt(seq, 2, ids)
    cache.commit(seq, ids, 24)
    assert len(seq.hashes) == 6
    assert cache.take_events() == []
    other = cache.open(ROOT)
    assert cache.match_prefix(other, ids, 24, need_snapshot=False).num_blocks == 2
    cache.free(other)
    cache.free(seq)
    cache.check_invariants()
    assert (cache.available_blocks, cache.used_snapshots) == (16, 0)
    assert cache.match_prefix(seq, ids, 23, need_snapshot=False).num_blocks == 2
    assert cache.allocate(seq, 24) is not None
    cache.commit(seq, ids, 24)
    assert cache.cached_depth(seq.hashes) == 6


def test_a_match_after_allocation_is_refused() -> None:
    cache = PrefixCache(8, 4)
    ids = np.arange(8, dtype=np.uint32)
    seq = cache.open(ROOT)
    assert cache.allocate(seq, 8) is not None
    with pytest.raises(AssertionError, match="before allocation"):
        cache.match_prefix(seq, ids, 7)
