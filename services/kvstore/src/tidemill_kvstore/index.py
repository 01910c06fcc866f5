"""What is where: the in-memory index of stored blocks, and what it tells the mesh. Pure.

The mesh is told of block hashes only: one is announced with its first copy (of any kv_format and shard) and taken back
with its last.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill_kvcache.runs import CacheEvent, EventLog
from tidemill_kvstore.record import RecordHeader

Key = tuple[str, str, bytes]
"""(kv_format, shard, block hash)"""


def key_of(header: RecordHeader) -> Key:
    """What names a block."""
    return header.kv_format, header.shard, header.block_hash


@dataclass(slots=True)
class Entry:
    """Where a block lies."""

    header: RecordHeader
    segment_id: int
    offset: int
    referenced: bool = False
    """Read since it was written: it outlives its segment."""


class Index:
    """Entries by key and by segment."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._by_segment: dict[int, dict[Key, Entry]] = {}
        self._copies: Counter[bytes] = Counter()
        self._events = EventLog()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def leading_run(self, kv_format: str, shard: str, hashes: Sequence[bytes]) -> Iterator[Entry]:
        """Entries of the leading hashes that are here."""
        for block_hash in hashes:
            entry = self._entries.get((kv_format, shard, block_hash))
            if entry is None:
                return
            yield entry

    def put(self, entry: Entry) -> None:
        """Enters a block, in place of an older copy of it."""
        key = key_of(entry.header)
        older = self._entries.get(key)
        if older is not None:
            del self._by_segment[older.segment_id][key]
        else:
            self._copies[key[2]] += 1
            if self._copies[key[2]] == 1:
                self._events.stored(entry.header.parent_hash, key[2], entry.header.has_snapshot)
        self._entries[key] = entry
        self._by_segment.setdefault(entry.segment_id, {})[key] = entry

    def remove(self, entry: Entry) -> bool:
        """Takes a block out, if this entry of it is the present one."""
        key = key_of(entry.header)
        if self._entries.get(key) is not entry:
            return False
        del self._entries[key]
        del self._by_segment[entry.segment_id][key]
        self._copies[key[2]] -= 1
        if not self._copies[key[2]]:
            del self._copies[key[2]]
            self._events.removed(key[2])
        return True

    def in_segment(self, segment_id: int) -> list[Entry]:
        """What is alive in a segment, in order of writing."""
        return list(self._by_segment.get(segment_id, {}).values())

    def forget_segment(self, segment_id: int) -> None:
        """Drops the bookkeeping of a segment that holds nothing any more."""
        assert not self._by_segment.get(segment_id), "the segment still holds blocks"
        self._by_segment.pop(segment_id, None)

    def take_events(self) -> list[CacheEvent]:
        """What came and went since the last call, in order."""
        return self._events.take()
