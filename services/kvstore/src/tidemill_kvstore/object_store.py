"""The block store in an S3-compatible object store: one object for each block, shared by all kvstores that name it.

What is there is known from listings: at the start, and again from time to time, since others write too. An object that
is gone when it is read was evicted by another kvstore, and is a miss.
"""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from tidemill_kvcache.runs import CacheEvent
from tidemill_kvstore.block_store import Bytes
from tidemill_kvstore.index import Entry, Index, Key, key_of
from tidemill_kvstore.object_names import BLOCKS, FORMATS, block_name, format_digest, parse_block_name
from tidemill_kvstore.quotas import Quotas
from tidemill_kvstore.record import BadRecord, RecordHeader, decode_header, encode_header
from tidemill_transfer.checksum import checksum64

_PARALLEL = 8
"""Requests of one batch at a time."""
_FAILURES = (BaseError, OSError)

_log = logging.getLogger(__name__)


class ObjectBlockStore:
    """Blocks in a bucket, up to a capacity."""

    def __init__(
        self,
        bucket: ObjectStore,
        capacity_bytes: int,
        max_block_bytes: int,
        quotas: Quotas | None = None,
        list_s: float = math.inf,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_block_bytes = max_block_bytes
        self.counters: Counter[str] = Counter()
        self._bucket = bucket
        self._quotas = quotas or Quotas()
        self._list_s = list_s
        self._index = Index()
        self._used_bytes = 0
        self._by_use: OrderedDict[Key, Entry] = OrderedDict()
        self._formats: dict[str, str] = {}
        self._lock = threading.Lock()  # of index and counters; never held over a request
        self._naming = threading.Lock()
        self._requests = ThreadPoolExecutor(_PARALLEL, "kvstore-object")
        self._stop = threading.Event()
        self.refresh()
        self._lister = threading.Thread(target=self._keep_listing, name="kvstore-list", daemon=True)
        self._lister.start()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return len(self._index)

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of readable blocks by tenant."""
        with self._lock:
            return self._index.tenant_bytes()

    def take_events(self) -> list[CacheEvent]:
        """What became readable and what went since the last call, in order."""
        with self._lock:
            return self._index.take_events()

    def fits(self, header: RecordHeader) -> bool:
        """Whether a block of this size is taken at all."""
        quota = self._quotas.of(header.tenant)
        within = not quota or header.size_bytes <= quota
        return within and header.size_bytes <= self.max_block_bytes and "/" not in header.shard

    def refresh(self) -> None:
        """Learns what is in the bucket; raises the bucket's error."""
        found: dict[Key, RecordHeader] = {}
        with self._lock:
            known = list(self._by_use.values())
        for page in self._bucket.list(f"{FORMATS}/"):
            for item in page:
                digest = item["path"].rpartition("/")[2]
                if digest not in self._formats:
                    self._learn_format(digest, bytes(self._bucket.get(item["path"]).bytes()))
        for page in self._bucket.list(f"{BLOCKS}/"):
            for item in page:
                header = parse_block_name(item["path"], self._formats)
                if header is not None:
                    other = found.get(key_of(header))
                    if other is None or header.has_snapshot:
                        found[key_of(header)] = header
        with self._lock:
            for entry in known:
                if key_of(entry.header) not in found:
                    self._forget(entry)
            for header in found.values():
                if self._index.get(key_of(header)) is None:
                    self._enter(header)

    def put(self, blocks: Sequence[tuple[RecordHeader, Bytes]]) -> list[bool]:
        """Stores blocks whose checksums were verified; True for those that are stored now, or were before."""
        with self._lock:
            stored = [self._index.has(header) for header, _ in blocks]
        new = [index for index, has in enumerate(stored) if not has]
        for index, done in zip(new, self._requests.map(lambda i: self._upload(*blocks[i]), new), strict=True):
            stored[index] = done
        self._make_room({header.tenant for header, _ in blocks})
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
            found = self._index.find(kv_format, shard, hashes, max_bytes)
            for entry in found:
                self._by_use.move_to_end(key_of(entry.header))
        return found

    def read(self, entries: Sequence[Entry], out: Bytes, until_s: float = math.inf) -> int:
        """Reads found blocks one after the other into `out`, several at a time; returns how many leading ones are
        whole and verified."""
        ends = np.cumsum([entry.header.size_bytes for entry in entries])
        parts = [out[end - entry.header.size_bytes : end] for entry, end in zip(entries, ends, strict=True)]
        # All of them: nothing may write into `out` after the answer.
        read = list(self._requests.map(self._download, entries, parts, [until_s] * len(parts)))
        return read.index(False) if False in read else len(read)

    def check(self, entries: Sequence[Entry]) -> None:
        """`read` has looked at all of its batch already."""

    def close(self) -> None:
        """Ends the listing and the requests; idempotent."""
        self._stop.set()
        self._lister.join()
        self._requests.shutdown()

    def _keep_listing(self) -> None:
        while not self._stop.wait(None if math.isinf(self._list_s) else self._list_s):
            try:
                self.refresh()
            except _FAILURES as error:
                self._count("disk_errors")
                _log.warning("the object store does not list its blocks: %s", error)

    def _upload(self, header: RecordHeader, payload: Bytes) -> bool:
        try:
            self._name_format(header.kv_format)
            self._bucket.put(block_name(header), encode_header(header) + payload.tobytes())
        except _FAILURES as error:
            self._count("disk_errors")
            _log.error("the object store refuses a block: %s", error)
            return False
        with self._lock:
            self.counters["written_blocks"] += 1
            self.counters["written_bytes"] += header.size_bytes
            other = self._index.get(key_of(header))
            # Its batch has it twice, or a listing saw it first.
            present = self._index.has(header)
            if not present:
                if other is not None:
                    self._forget(other)
                self._enter(header)
        # The same name is the same object: the one that was just written.
        if other is not None and block_name(other.header) != block_name(header):
            self._delete([header if present else other.header])
        return True

    def _learn_format(self, digest: str, name: bytes) -> None:
        """Takes a format's name, unless it is damaged: the next put of a block of the format writes it again."""
        kv_format = name.decode(errors="replace")
        if format_digest(kv_format) == digest:
            self._formats[digest] = kv_format
        else:
            _log.error("the object store holds a damaged name of a format: %s/%s", FORMATS, digest)

    def _name_format(self, kv_format: str) -> None:
        """Lets a listing know what the format of its names is."""
        digest = format_digest(kv_format)
        with self._naming:
            if digest not in self._formats:
                self._bucket.put(f"{FORMATS}/{digest}", kv_format.encode())
                self._formats[digest] = kv_format

    def _download(self, entry: Entry, out: Bytes, until_s: float) -> bool:
        if time.monotonic() >= until_s:
            return False
        try:
            body = bytes(self._bucket.get(block_name(entry.header)).bytes())
        except FileNotFoundError:
            self._drop(entry, "missing_segments", "it is gone")
            return False
        except _FAILURES as error:
            self._count("disk_errors")
            _log.warning("the object store does not give a block: %s", error)
            return False
        head = len(encode_header(entry.header))
        try:
            intact = decode_header(body[:head]) == entry.header and len(body) == head + out.nbytes
        except BadRecord:
            intact = False
        if intact:
            out[:] = np.frombuffer(body, np.uint8, offset=head)
            intact = checksum64(out) == entry.header.checksum
        if not intact:
            self._drop(entry, "damaged_blocks", "its bytes are not those that were written")
        return intact

    def _drop(self, entry: Entry, counted_as: str, reason: str) -> None:
        with self._lock:
            if self._index.get(key_of(entry.header)) is not entry:
                return
            self._forget(entry)
            self.counters[counted_as] += 1
        _log.error("a block of the object store is lost: %s", reason)
        self._delete([entry.header])

    def _make_room(self, tenants: set[str]) -> None:
        """Deletes blocks beyond their tenants' quotas, then those that were used least recently."""
        gone: list[RecordHeader] = []
        with self._lock:
            for tenant in tenants:
                quota = self._quotas.of(tenant)
                while quota and self._index.bytes_of(tenant) > quota:
                    oldest = self._index.oldest_of(tenant)
                    assert oldest is not None, "bytes without blocks"
                    gone.append(oldest.header)
                    self._forget(oldest)
                    self.counters["over_quota_blocks"] += 1
            while self._used_bytes > self.capacity_bytes:
                oldest = next(iter(self._by_use.values()))
                gone.append(oldest.header)
                self._forget(oldest)
                self.counters["evicted_blocks"] += 1
        self._delete(gone)

    def _delete(self, headers: Sequence[RecordHeader]) -> None:
        try:
            if headers:
                self._bucket.delete([block_name(header) for header in headers])
        except _FAILURES as error:
            self._count("disk_errors")
            _log.warning("the object store does not delete blocks: %s", error)

    def _enter(self, header: RecordHeader) -> None:
        entry = Entry(header, segment_id=0, offset=0)
        self._index.put(entry)
        self._by_use[key_of(header)] = entry
        self._used_bytes += header.size_bytes

    def _forget(self, entry: Entry) -> None:
        if self._index.remove(entry):
            del self._by_use[key_of(entry.header)]
            self._used_bytes -= entry.header.size_bytes

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1
