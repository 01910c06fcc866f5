"""All block accounting of one cache domain: allocation, prefix reuse, snapshots, eviction, events.

Content that two requests computed at the same time is cached once: the second one keeps its own block, outside the
tree, until it is freed, and meanwhile references the cached one as the parent of what it commits next.
"""

from collections.abc import Collection, Sequence
from itertools import chain

from tidemill_kvcache.block_pool import BlockPool
from tidemill_kvcache.hashing import TokenIds, hash_blocks
from tidemill_kvcache.pins import Pins
from tidemill_kvcache.prefix_tree import HIGHEST_PRIORITY, LOWEST_PRIORITY, NORMAL_PRIORITY, Node, PrefixTree
from tidemill_kvcache.runs import CacheEvent, EventLog, StoredRun, chain_runs
from tidemill_kvcache.sequence import CachedSequence, MatchResult
from tidemill_kvcache.snapshots import SnapshotHolder, SnapshotPool

PRIVATE = -1
"""Generation of sequences whose blocks never enter the tree."""


class PrefixCache:
    """Blocks and snapshots of one domain; not thread-safe, used by its scheduler only."""

    def __init__(
        self, num_blocks: int, block_size: int, *, num_snapshots: int = 0, snapshot_interval_tokens: int = 0
    ) -> None:
        assert snapshot_interval_tokens % block_size == 0, "snapshots are taken at block boundaries"
        self.block_size = block_size
        self.snapshot_interval_blocks = snapshot_interval_tokens // block_size
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree()
        self._snapshots = SnapshotPool(num_snapshots, self._snapshot_left)
        self._events = EventLog()
        self._pins = Pins()
        self._sequences: set[CachedSequence] = set()
        self._detached: set[Node] = set()
        self._generation = 0

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._pool.free_blocks

    @property
    def available_blocks(self) -> int:
        """Free and evictable blocks."""
        return self._pool.free_blocks + self._tree.num_evictable

    @property
    def used_blocks(self) -> int:
        """Blocks referenced by sequences or pins."""
        return self._pool.num_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that a match can find."""
        return len(self._tree)

    @property
    def pinned_blocks(self) -> int:
        """Blocks under pins, once for each pin."""
        return self._pins.num_blocks

    @property
    def used_snapshots(self) -> int:
        """Snapshots that are referenced or wait for their commit."""
        pool = self._snapshots
        return pool.num_snapshots - pool.free_snapshots - pool.evictable_snapshots

    def open(self, root: bytes, priority: int = NORMAL_PRIORITY) -> CachedSequence:
        """A cursor at the start of a request's chain; its blocks are kept longer than those of a lower priority.

        Any integer is a priority, but there are only three kinds: below 0, 0, above 0.
        """
        kept = max(LOWEST_PRIORITY, min(priority, HIGHEST_PRIORITY))
        return CachedSequence(root, self._generation, priority=kept)

    def match_prefix(
        self, seq: CachedSequence, token_ids: TokenIds, limit_tokens: int, *, need_snapshot: bool = True
    ) -> MatchResult:
        """Extends the sequence by cached blocks, at most to `limit_tokens`, and references them.

        Where the model has per-sequence state the match ends at a boundary that has a snapshot, unless
        `need_snapshot` is False (the state comes another way).
        """
        assert len(seq.block_ids) == seq.num_cached_blocks, "a match comes before allocation"
        self._enter_generation(seq)
        if seq.generation == self._generation:
            limit_blocks = min(limit_tokens, len(token_ids)) // self.block_size
            self._extend_chain(seq, token_ids, limit_blocks)
            by_snapshot = need_snapshot and self.snapshot_interval_blocks > 0
            node = self._deepest(seq, limit_blocks, by_snapshot)
            if node is not None:
                self._take_path(seq, node, by_snapshot)
        held = seq.held_snapshot.snapshot_id if seq.held_snapshot else -1
        return MatchResult(len(seq.hashes) * self.block_size, len(seq.hashes), held)

    def can_allocate(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Whether `allocate` would succeed now."""
        return self._blocks_lacking(seq, num_tokens) <= self.available_blocks

    def allocate(self, seq: CachedSequence, num_tokens: int) -> list[int] | None:
        """New blocks, so that the sequence covers `num_tokens`; evicts as needed. None: too few, nothing changed."""
        lacking = self._blocks_lacking(seq, num_tokens)
        if lacking > self.available_blocks:
            return None
        while self._pool.free_blocks < lacking:
            node = self._tree.evict()
            self._events.removed(node.hash)
            self._end(node)
        block_ids = self._pool.allocate(lacking)
        if block_ids:
            self._enter_generation(seq)
            self._sequences.add(seq)
            seq.block_ids += block_ids
        return block_ids

    def comes_free(self, seqs: Collection[CachedSequence], wanted: int) -> bool:
        """Whether so many blocks would be available once all pins were over and these sequences freed; O(wanted) and
        the number of sequences and pinned blocks."""
        missing = wanted - self.available_blocks
        missing -= sum(len(seq.unshared) + len(seq.block_ids) - len(seq.hashes) for seq in seqs)
        if missing <= 0:
            return True
        tips = (seq.tip for seq in seqs if seq.tip is not None)
        return self._tree.num_ended_by(chain(tips, self._pins.references()), missing) >= missing

    def commit(self, seq: CachedSequence, token_ids: TokenIds, computed_tokens: int) -> None:
        """Makes newly full blocks reusable; `token_ids` is the whole sequence so far."""
        self.release_snapshot(seq)
        full_blocks = computed_tokens // self.block_size
        start = len(seq.hashes)
        if full_blocks <= start:
            return
        assert full_blocks <= len(seq.block_ids), "computed tokens lie outside the allocated blocks"
        self._extend_chain(seq, token_ids, full_blocks)
        for index in range(start, full_blocks):
            self._commit_block(seq, index)

    def adopt(self, seq: CachedSequence, num_blocks_filled: int, token_ids: TokenIds) -> None:
        """Commits the `num_blocks_filled` blocks after the committed ones, whose bytes came from elsewhere.

        Snapshots asked for by `store_snapshot` within them are in place too (`discard_snapshot` those that are not);
        those beyond are freed.
        """
        end = len(seq.hashes) + num_blocks_filled
        for boundary in [b for b in seq.pending_snapshots if b > end]:
            self._snapshots.free(seq.pending_snapshots.pop(boundary))
        self.commit(seq, token_ids, end * self.block_size)

    def keep_private(self, seq: CachedSequence) -> None:
        """What the sequence commits from now on, until `free`, is never matched and told to nobody."""
        seq.generation = PRIVATE

    def store_snapshot(self, seq: CachedSequence, boundary_tokens: int) -> int | None:
        """A snapshot id to fill with the state at a boundary; None: no room, there already, or beyond the blocks.

        At a boundary yet to be committed it is attached by the commit; at a committed one it is attached at once, so
        its bytes must be in place before the next match.
        """
        assert boundary_tokens % self.block_size == 0, "snapshots are taken at block boundaries"
        boundary = boundary_tokens // self.block_size
        if not 0 < boundary <= len(seq.block_ids) or seq.generation != self._generation:
            return None
        if boundary in seq.pending_snapshots:
            return seq.pending_snapshots[boundary]
        node = self._tree.get(seq.hash_chain[boundary - 1]) if boundary <= len(seq.hash_chain) else None
        if node is not None and node.snapshot_id >= 0:
            return None
        snapshot_id = self._snapshots.allocate()
        if snapshot_id is None:
            return None
        if boundary <= len(seq.hashes):
            assert node is not None, "a committed block of this generation is in the tree"
            self._attach_snapshot(node, snapshot_id)
        else:
            seq.pending_snapshots[boundary] = snapshot_id
        return snapshot_id

    def discard_snapshot(self, seq: CachedSequence, boundary_tokens: int) -> None:
        """Takes back an id of `store_snapshot` that was not filled and not committed; unknown ones are ignored."""
        snapshot_id = seq.pending_snapshots.pop(boundary_tokens // self.block_size, None)
        if snapshot_id is not None:
            self._snapshots.free(snapshot_id)

    def hold_snapshot(self, seq: CachedSequence) -> int:
        """References the snapshot at the end of the committed blocks (after `adopt`); -1: there is none."""
        self.release_snapshot(seq)
        if seq.tip is None or seq.tip.snapshot_id < 0:
            return -1
        seq.held_snapshot = seq.tip
        return self._snapshots.reference(seq.tip)

    def release_snapshot(self, seq: CachedSequence) -> None:
        """Lets go of the matched snapshot; idempotent."""
        if seq.held_snapshot is not None:
            self._snapshots.release(seq.held_snapshot)
            seq.held_snapshot = None

    def free(self, seq: CachedSequence) -> None:
        """Drops all that the sequence holds; cached blocks stay until evicted. Idempotent."""
        self.release_snapshot(seq)
        for snapshot_id in seq.pending_snapshots.values():
            self._snapshots.free(snapshot_id)
        self._pool.free(seq.unshared + seq.block_ids[len(seq.hashes) :])
        if seq.tip is not None:
            self._release(seq.tip)
        self._sequences.discard(seq)
        seq.block_ids, seq.hashes, seq.unshared, seq.pending_snapshots = [], [], [], {}
        seq.tip, seq.num_cached_blocks = None, 0

    def lookup(self, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Block ids and snapshot ids (-1: none) of the leading hashes that are cached."""
        nodes = self._leading(hashes)
        return [node.block_id for node in nodes], [node.snapshot_id for node in nodes]

    def cached_depth(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are cached, in O(log n): a cached block's whole path is cached."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self._tree.get(hashes[middle - 1]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def coldest(self, count: int) -> list[bytes]:
        """Hashes of the cached blocks that would be evicted next, in order."""
        return self._tree.coldest(count)

    def pin(self, pin_id: int, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """As `lookup`, and keeps what it found until `unpin`."""
        pin = self._pins.add(pin_id, self._leading(hashes))
        for node in pin.path_ends:
            self._tree.reference(node)
        for node in pin.snapshot_nodes:
            self._snapshots.reference(node)
        return [node.block_id for node in pin.nodes], [node.snapshot_id for node in pin.nodes]

    def unpin(self, pin_id: int) -> None:
        """Ends a pin; unknown ids are ignored."""
        pin = self._pins.remove(pin_id)
        if pin is None:
            return
        for node in pin.snapshot_nodes:
            self._snapshots.release(node)
        for node in reversed(pin.path_ends):
            self._release(node)

    def reset(self) -> int:
        """Forgets all cached content; blocks in use stay until freed and are never matched again. Returns its size."""
        dropped = len(self._tree)
        in_use = [node for node in self._tree if node.ref_count]
        for node in self._tree.detach_all():
            self._end(node)
        self._detached.update(in_use)
        self._generation += 1
        self._events.cleared()
        return dropped

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call."""
        return self._events.take()

    def snapshot_blocks(self) -> list[StoredRun]:
        """All cached blocks, parents before children."""
        return chain_runs([(_parent_hash(node), node.hash, node.snapshot_id >= 0) for node in self._tree])

    def check_invariants(self) -> None:
        """Every block and snapshot is in exactly one place (O(n), for tests)."""
        self._tree.check_invariants()
        nodes = [*self._tree, *self._detached]
        elsewhere = [node.block_id for node in nodes]
        attached = [node.snapshot_id for node in nodes if node.snapshot_id >= 0]
        for seq in self._sequences:
            elsewhere += seq.unshared + seq.block_ids[len(seq.hashes) :]
            attached += seq.pending_snapshots.values()
        self._pool.check_invariants(elsewhere)
        assert len(set(attached)) == len(attached), "a snapshot is in two places"
        assert len(attached) + self._snapshots.free_snapshots == self._snapshots.num_snapshots, "a snapshot is lost"

    def _enter_generation(self, seq: CachedSequence) -> None:
        if not seq.block_ids:
            seq.generation = self._generation

    def _blocks_lacking(self, seq: CachedSequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(seq.block_ids))

    def _extend_chain(self, seq: CachedSequence, token_ids: TokenIds, num_blocks: int) -> None:
        known = len(seq.hash_chain)
        if num_blocks > known:
            parent = seq.hash_chain[-1] if known else seq.root
            tokens = token_ids[known * self.block_size : num_blocks * self.block_size]
            seq.hash_chain += hash_blocks(parent, tokens, self.block_size)

    def _deepest(self, seq: CachedSequence, limit_blocks: int, by_snapshot: bool) -> Node | None:
        """Deepest usable cached node beyond the cursor; a cached node's whole path is cached."""
        step = self.snapshot_interval_blocks if by_snapshot else 1
        first = (len(seq.hashes) // step + 1) * step
        deepest = None
        for end in range(first, limit_blocks + 1, step):
            node = self._tree.get(seq.hash_chain[end - 1])
            if node is None:
                break
            if not by_snapshot or node.snapshot_id >= 0:
                deepest = node
        return deepest

    def _take_path(self, seq: CachedSequence, node: Node, by_snapshot: bool) -> None:
        path = []
        current: Node | None = node
        while current is not seq.tip:
            assert current is not None, "the path of a node leads to the cursor"
            path.append(current)
            current = current.parent
        path.reverse()
        self._tree.reference(node)
        if seq.tip is not None:
            self._tree.release(seq.tip)
        seq.tip = node
        self._sequences.add(seq)
        seq.block_ids += [n.block_id for n in path]
        seq.hashes += [n.hash for n in path]
        seq.num_cached_blocks = len(seq.hashes)
        self._tree.raise_priority(node, seq.priority)
        if by_snapshot:
            self.hold_snapshot(seq)

    def _commit_block(self, seq: CachedSequence, index: int) -> None:
        block_hash = seq.hash_chain[index]
        seq.hashes.append(block_hash)
        snapshot_id = seq.pending_snapshots.pop(index + 1, None)
        if seq.generation != self._generation:
            seq.unshared.append(seq.block_ids[index])
            if snapshot_id is not None:
                self._snapshots.free(snapshot_id)
            return
        node = self._tree.get(block_hash)
        if node is None:
            node = self._tree.insert(block_hash, seq.tip, seq.block_ids[index])
            self._events.stored(_parent_hash(node), block_hash, snapshot_id is not None)
            if snapshot_id is not None:
                self._snapshots.attach(node, snapshot_id)
        else:
            self._tree.reference(node)
            seq.unshared.append(seq.block_ids[index])
            if snapshot_id is not None:
                self._attach_snapshot(node, snapshot_id)
        self._tree.raise_priority(node, seq.priority)
        if seq.tip is not None:
            self._tree.release(seq.tip)
        seq.tip = node

    def _attach_snapshot(self, node: Node, snapshot_id: int) -> None:
        """Attaches to a node announced before, and announces it again if that is news."""
        if node.snapshot_id < 0:
            self._events.stored(_parent_hash(node), node.hash, True)
        self._snapshots.attach(node, snapshot_id)

    def _snapshot_left(self, holder: SnapshotHolder) -> None:
        """Of a block that was told of; one that outlived a reset is known to nobody."""
        if isinstance(holder, Node) and self._tree.get(holder.hash) is holder:
            self._events.snapshot_dropped(holder.hash)

    def _leading(self, hashes: Sequence[bytes]) -> list[Node]:
        nodes = []
        for block_hash in hashes:
            node = self._tree.get(block_hash)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _release(self, node: Node) -> None:
        for ended in self._tree.release(node):
            self._detached.discard(ended)
            self._end(ended)

    def _end(self, node: Node) -> None:
        self._snapshots.drop(node)
        self._pool.free([node.block_id])


def _parent_hash(node: Node) -> bytes:
    return node.parent.hash if node.parent else b""
