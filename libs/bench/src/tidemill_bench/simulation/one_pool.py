"""A trace through one cache, a request at a time: what an oracle of exact LRU hits can be held to, line by line."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidemill_bench.simulation.trace import ROOT, TraceRequest
from tidemill_kvcache.cache import PrefixCache


def hit_blocks(requests: Sequence[TraceRequest], num_blocks: int) -> list[int]:
    """Leading cached blocks of each prompt, its last, partial block counted like the others; then all are stored."""
    cache = PrefixCache(num_blocks, 1)
    hits = []
    for request in requests:
        # A block's id stands for its tokens: the identity of a prefix is the same.
        ids = np.asarray(request.block_ids[:num_blocks], np.uint32)
        sequence = cache.open(ROOT)
        hits.append(cache.match_prefix(sequence, ids, len(ids)).num_blocks)
        assert cache.allocate(sequence, len(ids)) is not None, "a prompt alone fits the pool"
        cache.commit(sequence, ids, len(ids))
        cache.free(sequence)
    return hits


def read_oracle(path: Path, column: str) -> list[int]:
    """Hit blocks by line of the trace, in order of arrival; the column names the cache, such as `lru_10000`."""
    with path.open() as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: (int(row["timestamp_ms"]), int(row["line"])))
    return [int(row[column]) for row in rows]
