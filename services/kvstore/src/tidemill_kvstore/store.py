"""The block store on one disk: append-only segments, an index in memory, eviction by segment with a second chance.

Threads: any number may read while one writes. A block is in the index only once it is written whole, and every read is
verified against its checksum, so that neither a crash nor the disk can make it serve a wrong byte.
"""

import errno
import fcntl
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tidemill_kvcache.runs import CacheEvent
from tidemill_kvstore.index import Entry, Index, key_of
from tidemill_kvstore.quotas import Quotas
from tidemill_kvstore.record import BadRecord, RecordHeader
from tidemill_kvstore.segment import (
    Bytes,
    ScanResult,
    SegmentWriter,
    read_record,
    record_bytes,
    scan_segment,
    segment_ids,
    segment_path,
)
from tidemill_transfer.checksum import checksum64

FsyncPolicy = Literal["none", "segment", "put"]

MIN_SEGMENTS = 4
"""A capacity is cut into so many segments at least: one segment at a time is evicted."""

_log = logging.getLogger(__name__)


class StoreLocked(Exception):
    """Another process uses the folder."""


class SegmentStore:
    """Blocks in a folder, up to a capacity."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        segment_bytes: int,
        fsync: FsyncPolicy = "none",
        quotas: Quotas | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._quotas = quotas or Quotas()
        self.segment_bytes = min(segment_bytes, capacity_bytes // MIN_SEGMENTS)
        self.counters: Counter[str] = Counter()
        self._folder = folder
        self._fsync = fsync
        self._index = Index()
        self._sizes: dict[int, int] = {}
        self._used_bytes = 0
        """The sum of `_sizes`, which each put asks for: a large disk has 100,000 segments."""
        self._lock = threading.Lock()  # of index, sizes and counters; never held over a disk access
        self._write_lock = threading.Lock()  # one writer; taken before _lock
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = _lock_folder(folder)
        self._recover()
        last = max(self._sizes, default=1)
        self._writer = self._open_segment(last if self._sizes.get(last, 0) < self.segment_bytes else last + 1)
        with self._write_lock:
            for tenant in self.tenant_bytes():
                self._keep_quota(tenant, 0)
            self._make_room(0)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return len(self._index)

    @property
    def max_block_bytes(self) -> int:
        return self.segment_bytes

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of readable blocks by tenant."""
        with self._lock:
            return self._index.tenant_bytes()

    def take_events(self) -> list[CacheEvent]:
        """What became readable and what went since the last call, in order; the first call tells of all there is."""
        with self._lock:
            return self._index.take_events()

    def fits(self, header: RecordHeader) -> bool:
        """Whether a block of this size is taken at all."""
        quota = self._quotas.of(header.tenant)
        return record_bytes(header) <= self.segment_bytes and (not quota or header.size_bytes <= quota)

    def put(self, blocks: Sequence[tuple[RecordHeader, Bytes]]) -> list[bool]:
        """Stores blocks whose checksums were verified; True for those that are stored now, or were before.

        When the disk refuses, that block and the rest are False and `disk_errors` rises; with fsync = "put" all are,
        since none is known to be on the disk.
        """
        stored = [False] * len(blocks)
        with self._write_lock:
            try:
                for index, (header, payload) in enumerate(blocks):
                    if not self._has(header):
                        self._append(header, payload)
                    stored[index] = True
                if self._fsync == "put":
                    self._writer.sync()
            except OSError as error:
                self._count("disk_errors")
                _log.error("the disk refuses blocks: %s", error)
                if self._fsync == "put":
                    return [False] * len(blocks)
        return stored

    def peek(self, kv_format: str, shard: str, hashes: Sequence[bytes]) -> list[Entry | None]:
        """The entries of these blocks, None for those that are not here."""
        with self._lock:
            return self._index.peek(kv_format, shard, hashes)

    def shards(self, kv_format: str) -> list[str]:
        """Shards of which there are blocks in this format."""
        with self._lock:
            return self._index.shards(kv_format)

    def find(self, kv_format: str, shard: str, hashes: Sequence[bytes], max_bytes: int) -> list[Entry]:
        """The leading run of these blocks, as far as it fits; they count as read."""
        with self._lock:
            return self._index.find(kv_format, shard, hashes, max_bytes)

    def read(self, entries: Sequence[Entry], out: Bytes, until_s: float = math.inf) -> int:
        """Reads found blocks one after the other into `out`; returns how many leading ones are whole and verified.
        Begins no block after `until_s` of the monotonic clock."""
        offset = 0
        for good, entry in enumerate(entries):
            size = entry.header.size_bytes
            if time.monotonic() >= until_s or not self._read_block(entry, out[offset : offset + size]):
                return good
            offset += size
        return len(entries)

    def check(self, entries: Sequence[Entry]) -> None:
        """Reads blocks; drops those that are damaged."""
        for entry in entries:
            self._read_block(entry, np.empty(entry.header.size_bytes, np.uint8))

    def close(self) -> None:
        """Closes the active segment and lets go of the folder; idempotent."""
        with self._write_lock:
            if self._lock_descriptor < 0:
                return
            if self._fsync != "none":
                self._writer.sync()
            self._writer.close()
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    # --- reading ---

    def _read_block(self, entry: Entry, out: Bytes) -> bool:
        try:
            found = read_record(segment_path(self._folder, entry.segment_id), entry.offset, entry.header, out)
        except FileNotFoundError:
            self._segment_missing(entry.segment_id)
            return False
        except (BadRecord, OSError) as error:
            if isinstance(error, BadRecord) or error.errno == errno.EIO:
                self._drop_damaged(entry, str(error))
            else:
                # No word about the block: this process is short of descriptors or memory, say.
                self._count("disk_errors")
                _log.error("a block of segment %d cannot be read now: %s", entry.segment_id, error)
            return False
        if found != entry.header or checksum64(out) != entry.header.checksum:
            self._drop_damaged(entry, "its checksum differs")
            return False
        return True

    def _drop_damaged(self, entry: Entry, reason: str) -> None:
        with self._lock:
            if self._index.remove(entry):
                self.counters["damaged_blocks"] += 1
                _log.error("a block of segment %d is damaged: %s", entry.segment_id, reason)

    def _segment_missing(self, segment_id: int) -> None:
        """Somebody deleted a file under us, unless we have just evicted it."""
        with self._lock:
            if segment_id not in self._sizes:
                return
            self._resize(segment_id, None)
            self.counters["missing_segments"] += 1
            _log.error("segment %d is gone from the disk", segment_id)
            for entry in self._index.in_segment(segment_id):
                self._index.remove(entry)
            self._index.forget_segment(segment_id)

    # --- writing; all with _write_lock held ---

    def _has(self, header: RecordHeader) -> bool:
        with self._lock:
            return self._index.has(header)

    def _append(self, header: RecordHeader, payload: Bytes) -> None:
        need = record_bytes(header)
        assert need <= self.segment_bytes, "callers ask fits() first"
        self._keep_quota(header.tenant, header.size_bytes)
        self._make_room(need)
        self._write(header, payload)

    def _write(self, header: RecordHeader, payload: Bytes) -> None:
        if not self._writer.exists():
            self._segment_missing(self._writer.segment_id)
            self._roll()
        elif self._writer.size_bytes and self._writer.size_bytes + record_bytes(header) > self.segment_bytes:
            self._roll()
        offset = self._writer.append(header, payload)
        with self._lock:
            self._resize(self._writer.segment_id, self._writer.size_bytes)
            self._index.put(Entry(header, self._writer.segment_id, offset))
            self.counters["written_blocks"] += 1
            self.counters["written_bytes"] += record_bytes(header)

    def _roll(self) -> None:
        if self._fsync != "none":
            self._writer.sync()
        # Opened first: where that fails, the store must not write to a descriptor that is closed, or another's by now.
        following = self._open_segment(self._writer.segment_id + 1)
        self._writer.close()
        self._writer = following

    def _open_segment(self, segment_id: int) -> SegmentWriter:
        writer = SegmentWriter(self._folder, segment_id)
        with self._lock:
            self._resize(segment_id, writer.size_bytes)
        return writer

    def _keep_quota(self, tenant: str, need: int) -> None:
        """Drops the tenant's own oldest blocks until there is room for `need` bytes within its quota."""
        quota = self._quotas.of(tenant)
        with self._lock:
            while quota and self._index.bytes_of(tenant) + need > quota:
                oldest = self._index.oldest_of(tenant)
                if oldest is None:
                    return
                self._index.remove(oldest)
                self.counters["over_quota_blocks"] += 1

    def _make_room(self, need: int) -> None:
        while self.used_bytes + need > self.capacity_bytes:
            with self._lock:
                dead = self._mostly_dead()
                victim = min(self._sizes) if dead is None else dead
            if victim == self._writer.segment_id:
                self._roll()
            self._evict(victim, keep_all=dead is not None)

    def _mostly_dead(self) -> int | None:
        """The segment whose blocks were dropped one by one (quotas, damage, newer copies) more than any other's."""
        dead = [
            (live, segment_id)
            for segment_id, size in self._sizes.items()
            if segment_id != self._writer.segment_id and 2 * (live := self._index.live_bytes(segment_id)) < size
        ]
        return min(dead)[1] if dead else None

    def _evict(self, segment_id: int, *, keep_all: bool) -> None:
        """Deletes a segment; what was read since it was written moves on, up to half a segment of it."""
        survivors = self._read_survivors(segment_id, keep_all=keep_all)
        surviving = {id(entry) for entry, _ in survivors}
        with self._lock:
            for entry in self._index.in_segment(segment_id):
                if id(entry) not in surviving and self._index.remove(entry):
                    self.counters["evicted_blocks"] += 1
            self._resize(segment_id, None)
        segment_path(self._folder, segment_id).unlink(missing_ok=True)
        for entry, payload in survivors:
            with self._lock:
                present = self._index.get(key_of(entry.header)) is entry
            if present:
                self._move(entry, payload, "compacted_blocks" if keep_all else "kept_blocks")
        with self._lock:
            self._index.forget_segment(segment_id)

    def _move(self, entry: Entry, payload: Bytes, counted_as: str) -> None:
        try:
            self._write(entry.header, payload)
            self._count(counted_as)
        except OSError as error:
            self._count("disk_errors")
            _log.error("the disk refuses a block that was to be kept: %s", error)
            with self._lock:
                self._index.remove(entry)

    def _read_survivors(self, segment_id: int, *, keep_all: bool) -> list[tuple[Entry, Bytes]]:
        survivors = []
        room = self.segment_bytes // 2
        with self._lock:
            entries = [entry for entry in self._index.in_segment(segment_id) if keep_all or entry.referenced]
        for entry in reversed(entries):
            room -= record_bytes(entry.header)
            if room < 0:
                break
            payload = np.empty(entry.header.size_bytes, np.uint8)
            if self._read_block(entry, payload):
                survivors.append((entry, payload))
        return survivors[::-1]

    # --- start ---

    def _recover(self) -> None:
        for segment_id in segment_ids(self._folder):
            path = segment_path(self._folder, segment_id)
            result = ScanResult()
            for offset, header in scan_segment(path, result):
                self._index.put(Entry(header, segment_id, offset))
            size = path.stat().st_size
            if result.end < size:
                os.truncate(path, result.end)
                self.counters["truncated_bytes"] += size - result.end
            self.counters["bad_records"] += result.bad_records
            if result.end:
                self._resize(segment_id, result.end)
            else:
                path.unlink()

    def _resize(self, segment_id: int, size: int | None) -> None:
        """A segment has so many bytes now; None: it is gone. With _lock held."""
        self._used_bytes += (size or 0) - self._sizes.pop(segment_id, 0)
        if size is not None:
            self._sizes[segment_id] = size

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1


def _lock_folder(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreLocked(f"{folder} is used by another process") from error
    return descriptor
