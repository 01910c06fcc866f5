"""Blocks that tests, and the processes that they kill, can make and compare."""

import numpy as np

from tidemill_kvstore.record import RecordHeader
from tidemill_kvstore.store import SegmentStore
from tidemill_transfer.checksum import checksum64


def make(
    number: int, size: int = 1000, *, snapshot: bool = False, shard: str = "all", parent: bytes = b"", tenant: str = ""
):
    """A block whose bytes follow from its number (and whether it has its snapshot)."""
    payload = np.random.default_rng([number, snapshot]).integers(0, 256, size, np.uint8)
    block_hash = number.to_bytes(16, "big")
    header = RecordHeader(block_hash, parent, "v1/b16/kv", shard, size, checksum64(payload), snapshot, 16, tenant)
    return header, payload


def get(store: SegmentStore, number: int, shard: str = "all") -> bytes | None:
    entries = store.find("v1/b16/kv", shard, [number.to_bytes(16, "big")], 1 << 30)
    if not entries:
        return None
    out = np.zeros(entries[0].header.size_bytes, np.uint8)
    return out.tobytes() if store.read(entries, out) else None
