"""A PrefixCache behaves as a naive model that recomputes everything from scratch, whatever is done to it."""

from copy import deepcopy

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.runs import CacheEvent, Cleared, StoredRun
from tidemill_kvcache.sequence import CachedSequence

BLOCK = 2
NUM_BLOCKS = 10
ROOT = chain_root(b"model", b"")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Live:
    """A request of the model: `path` is what it has committed."""

    def __init__(self, seq: CachedSequence, ids: list[int], generation: int, priority: int) -> None:
        self.seq, self.ids, self.generation = seq, np.array(ids, np.uint32), generation
        self.priority = max(-1, min(priority, 1))
        self.path: list[bytes] = []
        self.matched = 0

    @property
    def chain(self) -> list[bytes]:
        return hash_blocks(ROOT, self.ids, BLOCK)


class Model:
    """Cached hashes with their parents; LRU stamps are (priority, time of the last release, -depth)."""

    def __init__(self) -> None:
        self.parent: dict[bytes, bytes] = {}
        self.depth: dict[bytes, int] = {}
        self.stamp: dict[bytes, tuple[int, int, int]] = {}
        self.priority: dict[bytes, int] = {}
        self.live: list[Live] = []
        self.pins: dict[int, list[bytes]] = {}
        self.generation = 0
        self.time = 0

    def path_to(self, block_hash: bytes) -> list[bytes]:
        path = []
        while block_hash:
            path.append(block_hash)
            block_hash = self.parent[block_hash]
        return path

    def referenced(self) -> set[bytes]:
        ends = [r.path[-1] for r in self.live if r.path and r.generation == self.generation]
        ends += [h for pinned in self.pins.values() for h in pinned if h in self.parent]
        return {h for end in ends for h in self.path_to(end)}

    def stamp_released(self, before: set[bytes]) -> None:
        self.time += 1
        for block_hash in before - self.referenced():
            if block_hash in self.parent:
                self.stamp[block_hash] = (self.priority[block_hash], self.time, -self.depth[block_hash])

    def evict(self) -> bytes:
        victim = min(set(self.parent) - self.referenced(), key=lambda h: self.stamp[h])
        assert victim not in self.parent.values(), "only leaves may leave"
        del self.parent[victim], self.depth[victim], self.stamp[victim], self.priority[victim]
        return victim

    def use(self, live: Live) -> None:
        """What a request has matched or committed is worth at least what the request is."""
        for block_hash in live.path:
            if block_hash in self.parent and live.generation == self.generation:
                self.priority[block_hash] = max(self.priority.get(block_hash, -1), live.priority)


class CacheMachine(RuleBasedStateMachine):
    requests: Bundle[Live] = Bundle("requests")
    pins: Bundle[int] = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK)
        self.model = Model()
        self.announced: set[bytes] = set()
        self.content: dict[int, bytes] = {}
        self.next_pin = 0

    @rule(target=requests, ids=prompts, priority=st.integers(-2, 2))
    def open(self, ids: list[int], priority: int) -> Live:
        live = Live(self.cache.open(ROOT, priority), ids, self.model.generation, priority)
        self.model.live.append(live)
        return live

    @rule(live=requests, limit=st.integers(0, 14))
    def match(self, live: Live, limit: int) -> None:
        if len(live.seq.block_ids) != live.matched:
            return
        if not live.matched:
            live.generation = self.model.generation
        if live.generation == self.model.generation:
            limit_blocks = min(limit, len(live.ids)) // BLOCK
            while live.matched < limit_blocks and live.chain[live.matched] in self.model.parent:
                live.path.append(live.chain[live.matched])
                live.matched += 1
        self.model.use(live)
        result = self.cache.match_prefix(live.seq, live.ids, limit)
        assert result.num_blocks == live.matched == live.seq.num_cached_blocks
        for block_id, block_hash in zip(live.seq.block_ids, live.path, strict=True):
            assert self.content[block_id] == block_hash, "a matched block holds other content"

    @rule(live=requests, num_tokens=st.integers(0, 14))
    def allocate(self, live: Live, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(live.ids))
        lacking = max(0, -(-num_tokens // BLOCK) - len(live.seq.block_ids))
        free, fits = self.cache.free_blocks, lacking <= self.cache.available_blocks
        assert self.cache.can_allocate(live.seq, num_tokens) == fits
        if not live.seq.block_ids:
            live.generation = self.model.generation
        got = self.cache.allocate(live.seq, num_tokens)
        assert (got is not None) == fits
        if got is None:
            assert self.cache.free_blocks == free
            return
        assert len(got) == lacking
        for _ in range(lacking - free):
            self.model.evict()
        for block_id in got:
            self.content[block_id] = b"private"

    @rule(live=requests, computed=st.integers(0, 14))
    def commit(self, live: Live, computed: int) -> None:
        computed = min(computed, len(live.ids), len(live.seq.block_ids) * BLOCK)
        for index in range(len(live.path), computed // BLOCK):
            block_hash = live.chain[index]
            live.path.append(block_hash)
            if live.generation != self.model.generation:
                continue
            if block_hash not in self.model.parent:
                self.model.parent[block_hash] = live.chain[index - 1] if index else b""
                self.model.depth[block_hash] = index
                self.content[live.seq.block_ids[index]] = block_hash
        self.model.use(live)
        self.cache.commit(live.seq, live.ids, computed)
        assert live.seq.hashes == live.path

    @rule(live=requests, more=prompts)
    def extend(self, live: Live, more: list[int]) -> None:
        live.ids = np.append(live.ids, np.array(more, np.uint32))[:14]

    @rule(live=requests)
    def free(self, live: Live) -> None:
        before = self.model.referenced()
        live.path, live.matched = [], 0
        self.model.stamp_released(before)
        self.cache.free(live.seq)

    @rule(target=requests, ids=prompts, priority=st.integers(-2, 2), stay=st.booleans())
    def serve(self, ids: list[int], priority: int, stay: bool) -> Live:
        """A whole request at once, so that short sequences of steps reach pressure and sharing."""
        live = self.open(ids, priority)
        self.match(live, len(ids) - 1)
        self.allocate(live, len(ids))
        self.commit(live, len(ids))
        if not stay:
            self.free(live)
        return live

    @rule(ids=prompts)
    def look_up(self, ids: list[int]) -> None:
        hashes = hash_blocks(ROOT, ids, BLOCK)
        depth = sum(block_hash in self.model.parent for block_hash in hashes)
        assert self.cache.cached_depth(hashes) == depth == len(self.cache.lookup(hashes)[0])

    @rule(target=pins, ids=prompts, skip=st.integers(0, 2))
    def pin(self, ids: list[int], skip: int) -> int:
        hashes = hash_blocks(ROOT, ids, BLOCK)[skip:]
        expected = hashes[: next((i for i, h in enumerate(hashes) if h not in self.model.parent), len(hashes))]
        self.next_pin += 1
        self.model.pins[self.next_pin] = expected
        block_ids, _ = self.cache.pin(self.next_pin, hashes)
        assert [self.content[b] for b in block_ids] == expected
        return self.next_pin

    @rule(pin_id=consumes(pins))
    def unpin(self, pin_id: int) -> None:
        before = self.model.referenced()
        del self.model.pins[pin_id]
        self.model.stamp_released(before)
        self.cache.unpin(pin_id)

    @rule(chosen=st.sets(st.integers(0, 20)))
    def what_would_come_free(self, chosen: set[int]) -> None:
        """As if all pins were over and these sequences freed; asked of the cache as it is, done to a copy of it."""
        leaving = [live.seq for index, live in enumerate(self.model.live) if index in chosen]
        cache, copies = deepcopy((self.cache, leaving))
        for seq in copies:
            cache.free(seq)
        for pin_id in self.model.pins:
            cache.unpin(pin_id)
        for wanted in range(NUM_BLOCKS + 2):
            assert self.cache.comes_free(leaving, wanted) == (wanted <= cache.available_blocks)

    @rule()
    def reset(self) -> None:
        assert self.cache.reset() == len(self.model.parent)
        self.model.generation += 1
        self.model.parent, self.model.depth, self.model.stamp, self.model.priority = {}, {}, {}, {}

    @invariant()
    def agrees(self) -> None:
        cache, model = self.cache, self.model
        cache.check_invariants()
        assert cache.cached_blocks == len(model.parent)
        for event in cache.take_events():
            apply(event, self.announced)
        assert self.announced == set(model.parent)
        assert [h for run in cache.snapshot_blocks() for h in run.hashes] == list(
            dict.fromkeys(h for run in cache.snapshot_blocks() for h in run.hashes)
        )
        if model.generation == 0:
            assert cache.available_blocks - cache.free_blocks == len(set(model.parent) - model.referenced())

    def teardown(self) -> None:
        for live in self.model.live:
            self.cache.free(live.seq)
        for pin_id in self.model.pins:
            self.cache.unpin(pin_id)
        assert (self.cache.used_blocks, self.cache.pinned_blocks) == (0, 0)
        self.cache.check_invariants()


def apply(event: CacheEvent, announced: set[bytes]) -> None:
    """What an index does with an event; a child never arrives before its parent."""
    if isinstance(event, Cleared):
        announced.clear()
    elif isinstance(event, StoredRun):
        assert not event.parent or event.parent in announced
        announced.update(event.hashes)
    else:
        announced.difference_update(event.hashes)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
