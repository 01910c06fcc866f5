"""A worker service's copy of the block list of one domain, so that it can answer GetSnapshot without its ranks."""

from collections.abc import Iterable, Iterator

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L2, TIER_L3
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEvent
from tidemill_kvcache.domain_blocks import SnapshotHolder
from tidemill_kvcache.events import bitmap, with_snapshot
from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_kvcache.index import BlockIndex

UNBOUNDED_BYTES = 1 << 50
SEGMENT_SLOTS = 1024


class BlockMirror:
    """Blocks by tier with their parents: an index as large as its domain, whose holders are the kv_formats and the
    snapshots of each."""

    def __init__(self) -> None:
        self._index = BlockIndex(UNBOUNDED_BYTES, segment_slots=SEGMENT_SLOTS)

    def __len__(self) -> int:
        """Blocks, once for each tier and format."""
        return sum(map(self._index.blocks_of, self._formats))

    def apply(self, event: KvEvent) -> None:
        """Follows an event of the domain."""
        kind, index = event.WhichOneof("event"), self._index
        if kind == "stored":
            stored = event.stored
            index.stored(stored.kv_format_id, stored.parent_block_hash, stored.block_hashes, stored.tier)
            if stored.snapshot_bitmap:
                index.mark(SnapshotHolder(stored.kv_format_id), with_snapshot(stored), stored.tier)
        elif kind == "removed":
            removed = event.removed
            for holder in (SnapshotHolder(removed.kv_format_id), removed.kv_format_id):
                index.removed(holder, removed.block_hashes, removed.tier)
        elif kind == "snapshots_removed":
            gone = event.snapshots_removed
            index.removed(SnapshotHolder(gone.kv_format_id), gone.block_hashes, gone.tier)
        elif kind == "cleared":
            for kept in index.holders:
                index.drop(kept)

    def runs(self) -> Iterator[BlockStored]:
        """All blocks as they are at this call, whatever changes while they are read; in each tier parents before
        children.

        Only what must be done at once is: for millions of short runs the messages take most of the time.
        """
        held = [
            (tier, kv_format_id, list(self._index.marked_runs_of(kv_format_id, tier, [SnapshotHolder(kv_format_id)])))
            for kv_format_id in self._formats
            for tier in (TIER_L1, TIER_L2, TIER_L3)
        ]
        return (
            BlockStored(
                parent_block_hash=parent,
                block_hashes=packed,
                tier=tier,
                kv_format_id=kv_format_id,
                snapshot_bitmap=snapshots,
            )
            for tier, kv_format_id, runs in held
            for parent, packed, snapshots in _joined(runs)
        )

    @property
    def _formats(self) -> list[int]:
        return [holder for holder in self._index.holders if isinstance(holder, int)]


def _joined(runs: Iterable[tuple[bytes, bytes, bool]]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(parent, packed hashes, bitmap of the marked ones) with runs joined that follow each other."""
    parent, parts = b"", list[tuple[bytes, bool]]()
    for above, packed, is_marked in runs:
        if parts and above and above == parts[-1][0][-HASH_BYTES:]:
            parts.append((packed, is_marked))
            continue
        if parts:
            yield parent, *_join(parts)
        parent, parts = above, [(packed, is_marked)]
    if parts:
        yield parent, *_join(parts)


def _join(parts: list[tuple[bytes, bool]]) -> tuple[bytes, bytes]:
    packed = b"".join(part for part, _ in parts)
    if not any(is_marked for _, is_marked in parts):
        return packed, b""
    return packed, bitmap([is_marked for part, is_marked in parts for _ in range(len(part) // HASH_BYTES)])
