"""Dynamo's Rust RadixTree, run by the peers' Python: `dynamo_radix.py FLEET.npz ...`, one JSON line for each fleet.

Times are wall seconds of calls with arguments that are ready: events as JSON, hashes as a list of int. Applying is
queued, so a match that waits for it ends each timed round of events.
"""

import json
import resource
import sys
import time
from typing import Any

import numpy as np

CHUNK_BLOCKS = 128
REPEATS = 5
"""Of what takes microseconds; the shortest counts."""


def stored_json(event_id: int, parent: int | None, blocks: Any) -> bytes:
    """A stored event; `blocks` is uint64 [n, 2]: hash of the block's tokens, hash of the prefix."""
    listed = [{"block_hash": b, "tokens_hash": t, "mm_extra_info": None} for t, b in blocks.tolist()]
    return json.dumps({"event_id": event_id, "data": {"stored": {"parent_hash": parent, "blocks": listed}}}).encode()


def removed_json(event_id: int, hashes: list[int]) -> bytes:
    """A removed event."""
    return json.dumps({"event_id": event_id, "data": {"removed": {"block_hashes": hashes}}}).encode()


def cut(blocks: Any, lengths: Any) -> list[Any]:
    """Consecutive pieces of an array."""
    return np.split(blocks, np.cumsum(lengths)[:-1])


def measure(make_tree: Any, path: str) -> dict[str, Any]:
    """All figures of one fleet."""
    data = np.load(path)
    pieces = cut(data["blocks"], data["lengths"])
    parents = [int(p[1]) or None for p in data["parents"]]
    events = [
        (worker, stored_json(i, parents[i], pieces[i])) for i, worker in enumerate(data["workers"].tolist())
    ]  # fmt: skip
    queries = [query[:, 0].tolist() for query in cut(data["queries"], data["query_lengths"])]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tree = make_tree()
    start, cpu_start = time.perf_counter(), time.process_time()
    for worker, event in events:
        tree.apply_event(worker, event)
    tree.find_matches([1])
    insert_s, insert_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    kept_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    match_s, best = [], []
    for query in queries:
        start = time.perf_counter()
        found = tree.find_matches(query)
        match_s.append(time.perf_counter() - start)
        best.append(max(found.scores.values(), default=0))
    return {
        "insert_s": insert_s,
        "insert_cpu_s": insert_cpu_s,
        "kept_bytes": kept_bytes,
        "match_s": match_s,
        "best": best,
        "remove_s": remove(make_tree, data["long"]) if len(data["long"]) else 0.0,
        "chunked_s": {
            n: min(chunked(make_tree, data["long"][:n]) for _ in range(REPEATS))
            for n in (512, 2048, 8192)
            if len(data["long"])
        },
        "grown_s": {
            n: min(grown(make_tree, data["long"], n) for _ in range(REPEATS)) for n in (1, 16, 128) if len(data["long"])
        },
    }


def remove(make_tree: Any, blocks: Any) -> float:
    """A worker drops a prompt, deepest block first, in one event."""
    tree = make_tree()
    tree.apply_event(0, stored_json(0, None, blocks))
    event = removed_json(1, blocks[::-1, 1].tolist())
    tree.find_matches([1])
    start = time.perf_counter()
    tree.apply_event(0, event)
    tree.find_matches([1])
    return time.perf_counter() - start


def chunked(make_tree: Any, blocks: Any) -> float:
    """A prompt is prefilled in chunks: before each one its prefix is matched, after it the chunk is stored."""
    tree = make_tree()
    local = blocks[:, 0].tolist()
    rounds = []
    for at in range(0, len(blocks), CHUNK_BLOCKS):
        parent = int(blocks[at - 1, 1]) if at else None
        rounds.append((local[: at + CHUNK_BLOCKS], stored_json(at, parent, blocks[at : at + CHUNK_BLOCKS])))
    tree.find_matches([1])
    start = time.perf_counter()
    for prefix, event in rounds:
        tree.find_matches(prefix)
        tree.apply_event(0, event)
    tree.find_matches([1])
    return time.perf_counter() - start


def grown(make_tree: Any, blocks: Any, size: int) -> float:
    """Seconds for each of the events of so many blocks in which a worker announces a prompt."""
    tree = make_tree()
    events = [
        stored_json(at, int(blocks[at - 1, 1]) if at else None, blocks[at : at + size])
        for at in range(0, len(blocks), size)
    ]
    tree.find_matches([1])
    start = time.perf_counter()
    for event in events:
        tree.apply_event(0, event)
    tree.find_matches([1])
    return (time.perf_counter() - start) / len(events)


def main() -> None:
    """Prints figures of each fleet, and of hashing."""
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

    for path in sys.argv[1:]:
        print(json.dumps(measure(RadixTree, path)), flush=True)
    tokens = np.random.default_rng(0).integers(0, 100_000, 131_072).tolist()
    start = time.perf_counter()
    compute_block_hash_for_seq(tokens, 16)
    print(json.dumps({"hash_s": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
