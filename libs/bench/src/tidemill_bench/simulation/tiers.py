"""What lies below L1 in a simulated fleet: host memory of each engine, and a store that all share.

Blocks reach the store when they are computed and an engine's host memory when they leave its pool, each once. Both
forget what was least recently used, and announce what they hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tidemill.mesh.v1.common_pb2 import TIER_L2, TIER_L3, Tier
from tidemill.mesh.v1.events_pb2 import KvEvent
from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_kvcache.events import removed_event, stored_event
from tidemill_kvcache.runs import CacheEvent, RemovedRun, StoredRun, chain_runs

Publish = Callable[[list[KvEvent]], None]


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """Sizes and speeds below L1; a tier of 0 blocks is not there."""

    l2_blocks: int = 0
    l3_blocks: int = 0
    l2_bytes_per_s: float = 25e9
    l3_bytes_per_s: float = 10e9
    """Of each engine's own link to the store."""
    l3_latency_s: float = 0.005
    peer_fetch: bool = False
    """Whether engines fetch from each other's memory."""
    peer_bytes_per_s: float = 50e9
    peer_latency_s: float = 0.005


class LruBlocks:
    """Hashes of the blocks of one tier, least recently used first."""

    def __init__(self, capacity: int, tier: "Tier.ValueType", publish: Publish) -> None:
        self.capacity = capacity
        self._tier = tier
        self._publish = publish
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, hashes: Sequence[bytes], parents: Mapping[bytes, bytes]) -> None:
        """Takes blocks in, parents before children; new ones are announced, and others dropped for them."""
        fresh = [block for block in hashes if block not in self._blocks]
        self._blocks.update(dict.fromkeys(fresh))
        self.touch(hashes)
        dropped = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self.capacity)]
        runs = chain_runs([(parents[block], block, False) for block in fresh])
        events = [stored_event(run.parent, run.hashes, self._tier) for run in runs]
        if dropped:
            events.append(removed_event(dropped, self._tier))
        if events:
            self._publish(events)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Blocks were used, given parents before children; the deepest will leave first."""
        for block in reversed(hashes):
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first hashes are here."""
        return len(list(takewhile(self._blocks.__contains__, hashes)))


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks that follow those of L1, and when they are there."""

    l2_blocks: int = 0
    peer_blocks: int = 0
    l3_blocks: int = 0
    seconds: float = 0.0


class LowerTiers:
    """One engine's way to its host memory and to the store."""

    def __init__(
        self, clock: SimulatedClock, shape: TierShape, block_bytes: int, host: LruBlocks, store: LruBlocks
    ) -> None:
        self._clock = clock
        self._shape = shape
        self._block_bytes = block_bytes
        self._host = host
        self._store = store
        self._link_free_s = 0.0
        self._parents: dict[bytes, bytes] = {}

    def follow(self, events: Sequence[CacheEvent]) -> None:
        """The pool took blocks in and let blocks go."""
        for event in events:
            if isinstance(event, StoredRun):
                self._parents.update(zip(event.hashes, [event.parent, *event.hashes], strict=False))
                if self._shape.l3_blocks:
                    self._store.put(event.hashes, self._parents)
            elif isinstance(event, RemovedRun) and self._shape.l2_blocks:
                self._host.put(event.hashes[::-1], self._parents)

    def held(self, hashes: Sequence[bytes]) -> int:
        """How many of the first hashes are in host memory."""
        return self._host.leading(hashes)

    def fetch(self, hashes: Sequence[bytes], compute_block_s: float, at_peer: int = 0) -> Fetch:
        """What to load of the blocks that follow L1's, if it pays: the run in host memory, what of the first `at_peer`
        comes after that from another engine, and at the same time the run in the store that goes on from there."""
        l2_blocks = self._host.leading(hashes)
        l2_s = l2_blocks * self._block_bytes / self._shape.l2_bytes_per_s
        if l2_s > l2_blocks * compute_block_s:
            return Fetch()
        peer_blocks = max(0, at_peer - l2_blocks)
        peer_s = self._shape.peer_latency_s + peer_blocks * self._block_bytes / self._shape.peer_bytes_per_s
        if peer_blocks == 0 or peer_s > peer_blocks * compute_block_s:
            peer_blocks, peer_s = 0, 0.0
        memory_blocks = l2_blocks + peer_blocks
        l3_blocks = self._store.leading(hashes[memory_blocks:])
        wait_s = max(0.0, self._link_free_s - self._clock.now_s)
        l3_s = self._shape.l3_latency_s + l3_blocks * self._block_bytes / self._shape.l3_bytes_per_s
        if l3_blocks == 0 or wait_s + l3_s > l3_blocks * compute_block_s:
            l3_blocks, l3_s, wait_s = 0, 0.0, 0.0
        else:
            self._link_free_s = self._clock.now_s + wait_s + l3_s
        self._host.touch(hashes[:l2_blocks])
        self._store.touch(hashes[: memory_blocks + l3_blocks])
        return Fetch(l2_blocks, peer_blocks, l3_blocks, l2_s + max(peer_s, wait_s + l3_s))


def host_blocks(shape: TierShape, publish: Publish) -> LruBlocks:
    """An engine's host memory."""
    return LruBlocks(shape.l2_blocks, TIER_L2, publish)


def store_blocks(shape: TierShape, publish: Publish) -> LruBlocks:
    """The store that all engines share."""
    return LruBlocks(shape.l3_blocks, TIER_L3, publish)
