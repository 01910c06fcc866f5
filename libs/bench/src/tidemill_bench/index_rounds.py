"""One round of the router's index, and of block hashing, over a fleet's events and queries."""

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tidemill.mesh.v1.common_pb2 import TIER_L1, DomainRef
from tidemill.mesh.v1.events_pb2 import BlockStored
from tidemill.mesh.v1.worker_pb2 import GetSnapshotResponse
from tidemill_bench.prefix_events import HASH_BYTES, Fleet
from tidemill_kvcache.hashing import chain_root, hash_blocks, split_hashes
from tidemill_kvcache.index import L1, L3, BlockIndex
from tidemill_kvcache.tracker import EventTracker

CHUNK_BLOCKS = 128
BOUND_BYTES = 1 << 30
REPEATS = 5
"""Of what takes microseconds; the shortest counts, here and for the peer."""


@dataclass
class Round:
    """Wall seconds, and the deepest hit of each query."""

    insert_s: float
    insert_cpu_s: float
    match_s: list[float]
    best: list[int]
    remove_s: float
    chunked_s: dict[int, float]
    """By blocks of the prompt."""
    grown_s: dict[int, float]
    """Seconds for an event, by its blocks."""
    bytes_per_block: float


def measure(fleet: Fleet) -> Round:
    """All figures of one fleet; the insert ends when each block can be found by its hash too."""
    names = [(f"prefill-{worker}", 0) for worker in range(64)]
    index = BlockIndex(BOUND_BYTES)
    start, cpu_start = time.perf_counter(), time.process_time()
    for event in fleet.events:
        index.stored(names[event.worker], event.parent, event.packed, L1)
    index.settle()
    insert_s, insert_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    match_s, best = [], []
    for query in fleet.queries:
        start = time.perf_counter()
        found = index.match(query)
        match_s.append(time.perf_counter() - start)
        best.append(max((depth.l1 for depth in found.values()), default=0))
    return Round(
        insert_s,
        insert_cpu_s,
        match_s,
        best,
        _remove(fleet.long) if fleet.long else 0.0,
        {
            blocks: min(_chunked(fleet.long[: blocks * HASH_BYTES]) for _ in range(REPEATS))
            for blocks in (512, 2048, 8192)
            if fleet.long
        },
        {blocks: min(_grown(fleet.long, blocks) for _ in range(REPEATS)) for blocks in (1, 16, 128) if fleet.long},
        index.bytes_used / index.distinct_blocks,
    )


def deepest_first(prompt: bytes) -> bytes:
    """The order in which a worker evicts the blocks of a prompt."""
    return b"".join(prompt[i : i + HASH_BYTES] for i in range(len(prompt) - HASH_BYTES, -1, -HASH_BYTES))


def _remove(prompt: bytes) -> float:
    """A worker drops a prompt, deepest block first, in one event."""
    index = BlockIndex(BOUND_BYTES)
    index.stored("prefill-0", b"", prompt, L1)
    gone = deepest_first(prompt)
    index.settle()
    start = time.perf_counter()
    index.removed("prefill-0", gone, L1)
    seconds = time.perf_counter() - start
    assert index.num_blocks == 0, "all were removed"
    return seconds


def _chunked(prompt: bytes) -> float:
    """A prompt is prefilled in chunks: before each one its prefix is matched, after it the chunk is stored.

    No cursor is handed over: both indexes are asked for the whole prefix. Ours passes over it by runs.
    """
    index, step = BlockIndex(BOUND_BYTES), CHUNK_BLOCKS * HASH_BYTES
    rounds = [
        (prompt[: at + step], prompt[at - HASH_BYTES : at] if at else b"", prompt[at : at + step])
        for at in range(0, len(prompt), step)
    ]
    start = time.perf_counter()
    for prefix, parent, chunk in rounds:
        index.match(prefix)
        index.stored("prefill-0", parent, chunk, L1)
    index.settle()
    return time.perf_counter() - start


def _grown(prompt: bytes, blocks: int) -> float:
    """Seconds for each of the events of so many blocks in which a worker announces a prompt."""
    index, step = BlockIndex(BOUND_BYTES), blocks * HASH_BYTES
    events = [
        (prompt[at - HASH_BYTES : at] if at else b"", prompt[at : at + step]) for at in range(0, len(prompt), step)
    ]
    start = time.perf_counter()
    for parent, packed in events:
        index.stored("prefill-0", parent, packed, L1)
    index.settle()
    return (time.perf_counter() - start) / len(events)


def short_prompts(blocks: int, workers: int) -> float:
    """Bytes a block of an index of 100,000 blocks in prompts of so few that have nothing in common."""
    rng = np.random.default_rng(4)
    index = BlockIndex(BOUND_BYTES)
    for number in range(100_000 // blocks):
        index.stored(number % workers, b"", rng.bytes(blocks * HASH_BYTES), L1)
    index.settle()
    return index.bytes_used / index.distinct_blocks


def shared_out(stores: int, prompts: int, blocks: int) -> float:
    """Bytes a block of an index of prompts whose blocks lie in several stores, each in that of its hash."""
    rng = np.random.default_rng(6)
    index = BlockIndex(BOUND_BYTES)
    for _ in range(prompts):
        hashes = split_hashes(rng.bytes(blocks * HASH_BYTES))
        chosen = [block_hash[0] % stores for block_hash in hashes]
        starts = [0, *(i for i in range(1, blocks) if chosen[i] != chosen[i - 1]), blocks]
        for start, end in pairwise(starts):
            index.stored(chosen[start], hashes[start - 1] if start else b"", hashes[start:end], L3)
    index.settle()
    return index.bytes_used / index.distinct_blocks


def rebuild(blocks: int, workers: int) -> float:
    """A restarted router takes in the block lists of all workers: parsing and applying snapshot messages."""
    rng = np.random.default_rng(2)
    shared = rng.bytes(256 * HASH_BYTES)
    lists: list[list[bytes]] = []
    for worker in range(workers):
        domain = DomainRef(instance=f"prefill-{worker}", incarnation="i", domain=0, epoch="e")
        lists.append([])
        lacking = blocks // workers
        while lacking > 0:
            new = min(lacking, int(rng.integers(32, 1024)))
            packed = shared + rng.bytes((new - 256) * HASH_BYTES) if new > 256 else shared[: new * HASH_BYTES]
            run = BlockStored(block_hashes=packed, tier=TIER_L1)
            lists[-1].append(GetSnapshotResponse(domain=domain, sequence=1, blocks=[run]).SerializeToString())
            lacking -= new
    index = BlockIndex(BOUND_BYTES)
    tracker = EventTracker(index, time.monotonic)
    start = time.perf_counter()
    for worker, messages in enumerate(lists):
        domain = DomainRef(instance=f"prefill-{worker}", incarnation="i", domain=0, epoch="e")
        tracker.register(domain)
        fetch_id = tracker.begin((domain.instance, 0))
        for message in messages:
            tracker.add_snapshot_blocks((domain.instance, 0), fetch_id, GetSnapshotResponse.FromString(message).blocks)
        tracker.complete(fetch_id, domain, 1)
    index.settle()
    return time.perf_counter() - start


@dataclass
class Churn:
    """What a long run leaves."""

    events: int
    block_events: int
    seconds: float
    live_blocks: int
    tenths_peak_bytes: list[int]
    """Most memory in each tenth of the prompts."""
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most memory of all."""
        return max(self.tenths_peak_bytes)


def churn(workers: int, live_prompts: int, prompts: int) -> Churn:
    """Prompts come in one event, grow block by block as they decode, and leave tail first in pieces, over and over."""
    rng = np.random.default_rng(3)
    index = BlockIndex(BOUND_BYTES)
    trunks = [rng.bytes(128 * HASH_BYTES) for _ in range(64)]
    live: list[tuple[int, bytes]] = []
    events = block_events = 0
    peaks = [0] * 10
    start = time.perf_counter()
    for number in range(prompts):
        worker = number % workers
        prompt = trunks[int(rng.integers(64))] + rng.bytes(int(rng.integers(64, 512)) * HASH_BYTES)
        output = rng.bytes(24 * HASH_BYTES)
        index.stored(worker, b"", prompt, L1)
        whole = prompt + output
        for at in range(len(prompt), len(whole), HASH_BYTES):
            index.stored(worker, whole[at - HASH_BYTES : at], whole[at : at + HASH_BYTES], L1)
        events, block_events = events + 25, block_events + len(whole) // HASH_BYTES
        live.append((worker, whole))
        if len(live) > live_prompts:
            place = int(rng.integers(len(live) // 4))
            live[place], live[-1] = live[-1], live[place]
            old_worker, old = live.pop()
            for end in range(len(old), 128 * HASH_BYTES, -32 * HASH_BYTES):
                gone = deepest_first(old[max(128 * HASH_BYTES, end - 32 * HASH_BYTES) : end])
                index.removed(old_worker, gone, L1)
                events, block_events = events + 1, block_events + len(gone) // HASH_BYTES
        tenth = 10 * number // prompts
        peaks[tenth] = max(peaks[tenth], index.bytes_used)
    seconds = time.perf_counter() - start
    return Churn(events, block_events, seconds, index.distinct_blocks, peaks, index.bytes_used)


def hashing_s(tokens: int, block_size: int) -> float:
    """Chained block hashes of a prompt."""
    ids = np.random.default_rng(0).integers(0, 100_000, tokens).astype(np.uint32)
    root = chain_root(b"model", b"")
    start = time.perf_counter()
    hash_blocks(root, ids, block_size)
    return time.perf_counter() - start
