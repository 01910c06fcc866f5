"""What is where: the in-memory index of stored blocks, and what it tells the mesh. Pure.

The mesh is told in which kv_format a block can be read: where all shards of one split of the heads are here, as ranks
write them, or the block in one piece.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tidemill_kvcache.kv_format import format_id, num_heads
from tidemill_kvcache.runs import CacheEvent, EventLog
from tidemill_kvcache.shards import WHOLE, shard_name, splits_of
from tidemill_kvstore.record import RecordHeader

Key = tuple[str, str, bytes]
"""(kv_format, shard, block hash)"""


def key_of(header: RecordHeader) -> Key:
    """What names a block."""
    return header.kv_format, header.shard, header.block_hash


class Readable(IntEnum):
    """How a block can be read: with the snapshot at its end where one split of it has that in every shard."""

    NO = 0
    YES = 1
    WITH_SNAPSHOT = 2


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
        self._by_tenant: dict[str, OrderedDict[Key, Entry]] = {}
        self._tenant_bytes: Counter[str] = Counter()
        self._live_bytes: Counter[int] = Counter()
        self._shards: dict[str, Counter[str]] = {}
        self._splits: dict[str, list[list[str]]] = {}
        """By kv_format: shards that together are a block."""
        self._events = EventLog()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def has(self, header: RecordHeader) -> bool:
        """Whether the block is here; a copy without snapshot does not stand for one with."""
        entry = self._entries.get(key_of(header))
        return entry is not None and (entry.header.has_snapshot or not header.has_snapshot)

    def peek(self, kv_format: str, shard: str, hashes: Sequence[bytes]) -> list[Entry | None]:
        """The entries of these blocks, None for those that are not here."""
        return [self._entries.get((kv_format, shard, block_hash)) for block_hash in hashes]

    def shards(self, kv_format: str) -> list[str]:
        """Shards of which there are blocks in this format."""
        return sorted(self._shards.get(kv_format, ()))

    def find(self, kv_format: str, shard: str, hashes: Sequence[bytes], max_bytes: int) -> list[Entry]:
        """The leading run of these blocks, as far as it fits; they count as read."""
        found = []
        for entry in self.peek(kv_format, shard, hashes):
            if entry is None or entry.header.size_bytes > max_bytes:
                break
            max_bytes -= entry.header.size_bytes
            entry.referenced = True
            found.append(entry)
        return found

    def put(self, entry: Entry) -> None:
        """Enters a block, in place of an older copy of it."""
        key = key_of(entry.header)
        older = self._entries.get(key)
        if older is not None:
            self._take_out(older, key)
        else:
            self._count_shard(key, 1)
        before = self._readable(key)
        self._entries[key] = entry
        self._tell(key, entry.header.parent_hash, before, self._readable(key))
        self._by_segment.setdefault(entry.segment_id, {})[key] = entry
        self._live_bytes[entry.segment_id] += entry.header.size_bytes
        self._by_tenant.setdefault(entry.header.tenant, OrderedDict())[key] = entry
        self._tenant_bytes[entry.header.tenant] += entry.header.size_bytes

    def remove(self, entry: Entry) -> bool:
        """Takes a block out, if this entry of it is the present one."""
        key = key_of(entry.header)
        if self._entries.get(key) is not entry:
            return False
        before = self._readable(key)
        del self._entries[key]
        self._take_out(entry, key)
        self._tell(key, entry.header.parent_hash, before, self._readable(key))
        self._count_shard(key, -1)
        return True

    def _readable(self, key: Key) -> Readable:
        """Whether the block of this key can be read in its kv_format, by ranks that split the heads in any way."""
        kv_format, _, block_hash = key
        readable = Readable.NO
        for split in self._splits.get(kv_format, ()):
            shards = [self._entries.get((kv_format, shard, block_hash)) for shard in split]
            if all(shards):
                if all(shard.header.has_snapshot for shard in shards if shard is not None):
                    return Readable.WITH_SNAPSHOT
                readable = Readable.YES
        return readable

    def _tell(self, key: Key, parent: bytes, before: Readable, now: Readable) -> None:
        number = format_id(key[0])
        if now > before:
            self._events.stored(parent, key[2], now is Readable.WITH_SNAPSHOT, number)
        elif now is Readable.NO and before is not Readable.NO:
            self._events.removed(key[2], number)
        elif now < before:
            self._events.snapshot_dropped(key[2], number)

    def _count_shard(self, key: Key, change: int) -> None:
        kv_format, shard, _ = key
        shards = self._shards.setdefault(kv_format, Counter())
        is_new = shard not in shards
        shards[shard] += change
        if shards[shard] and not is_new:
            return
        if not shards[shard]:
            del shards[shard]
        if shards:
            self._splits[kv_format] = _splits(kv_format, shards)
        else:
            del self._shards[kv_format], self._splits[kv_format]

    def live_bytes(self, segment_id: int) -> int:
        """Bytes of blocks that are alive in a segment."""
        return self._live_bytes[segment_id]

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of blocks by tenant."""
        return dict(self._tenant_bytes)

    def bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's blocks."""
        return self._tenant_bytes[tenant]

    def oldest_of(self, tenant: str) -> Entry | None:
        """The tenant's oldest block that was not read since it was last passed over; None when it has none."""
        entries = self._by_tenant.get(tenant)
        while entries:
            key, entry = next(iter(entries.items()))
            if not entry.referenced:
                return entry
            # Its second chance.
            entry.referenced = False
            entries.move_to_end(key)
        return None

    def in_segment(self, segment_id: int) -> list[Entry]:
        """What is alive in a segment, in order of writing."""
        return list(self._by_segment.get(segment_id, {}).values())

    def forget_segment(self, segment_id: int) -> None:
        """Drops the bookkeeping of a segment that holds nothing any more."""
        assert not self._by_segment.get(segment_id), "the segment still holds blocks"
        self._by_segment.pop(segment_id, None)
        self._live_bytes.pop(segment_id, None)

    def take_events(self) -> list[CacheEvent]:
        """What came and went since the last call, in order."""
        return self._events.take()

    def _take_out(self, entry: Entry, key: Key) -> None:
        del self._by_segment[entry.segment_id][key]
        self._live_bytes[entry.segment_id] -= entry.header.size_bytes
        tenant = entry.header.tenant
        del self._by_tenant[tenant][key]
        self._tenant_bytes[tenant] -= entry.header.size_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._tenant_bytes[tenant]


def _splits(kv_format: str, shards: Iterable[str]) -> list[list[str]]:
    """Which of these shards together are a block; of a format that does not tell its heads, only the whole."""
    heads = num_heads(kv_format)
    if not heads:
        return [[WHOLE]]
    return [[shard_name(part, heads) for part in split] for split in splits_of(shards, heads)]
