"""Eviction equals an independent leaf-first LRU on a public trace, request by request."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import chain_root

TRACE = Path(__file__).parent / "data" / "mooncake_synthetic_head.csv"


def requests() -> Iterator[tuple[int, list[int]]]:
    """(expected hit blocks, block ids) of each request."""
    for line in TRACE.read_text().splitlines():
        if line.startswith("#"):
            continue
        hits, runs = line.split(",")
        bounds = [run.split("-") for run in runs.split()]
        yield int(hits), [i for b in bounds for i in range(int(b[0]), int(b[-1]) + 1)]


def test_hits_equal_the_reference_line_by_line() -> None:
    cache, root = PrefixCache(1000, 1), chain_root(b"trace", b"")
    for number, (expected, ids) in enumerate(requests()):
        tokens = np.array(ids, np.uint32)
        seq = cache.open(root)
        assert cache.match_prefix(seq, tokens, len(ids)).num_blocks == expected, f"request {number}"
        assert cache.allocate(seq, len(ids)) is not None
        cache.commit(seq, tokens, len(ids))
        cache.free(seq)
    assert cache.used_blocks == 0
    cache.check_invariants()
