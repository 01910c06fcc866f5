"""Segment files: records one after the other, written at the end only."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidemill_kvstore.record import (
    FIXED_BYTES,
    MAGIC,
    BadRecord,
    RecordHeader,
    ShortRecord,
    decode_header,
    encode_header,
    header_bytes,
)

Bytes = npt.NDArray[np.uint8]

SUFFIX = ".segment"
_SEARCH_BYTES = 1 << 20


def segment_path(folder: Path, segment_id: int) -> Path:
    """Where a segment lies; ids rise in order of age."""
    return folder / f"{segment_id:012d}{SUFFIX}"


def segment_ids(folder: Path) -> list[int]:
    """Ids of the segments in a folder, oldest first."""
    stems = (path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


class SegmentWriter:
    """Appends to one segment."""

    def __init__(self, folder: Path, segment_id: int) -> None:
        self.segment_id = segment_id
        self._path = segment_path(folder, segment_id)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def append(self, header: RecordHeader, payload: Bytes) -> int:
        """Writes a record and returns its offset; on OSError nothing of it remains."""
        offset = self.size_bytes
        parts = [memoryview(encode_header(header)), payload.data]
        try:
            while parts:
                written = os.writev(self._descriptor, parts)
                while parts and written >= len(parts[0]):
                    written -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][written:]
        except OSError:
            os.ftruncate(self._descriptor, offset)
            raise
        self.size_bytes = offset + record_bytes(header)
        return offset

    def exists(self) -> bool:
        """Whether the file still has its name."""
        return self._path.exists()

    def sync(self) -> None:
        """Makes what was appended survive a loss of power."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def record_bytes(header: RecordHeader) -> int:
    """What a record takes on disk."""
    return len(encode_header(header)) + header.size_bytes


def read_record(path: Path, offset: int, header: RecordHeader, out: Bytes) -> RecordHeader:
    """Reads the record at an offset into `out` (of the payload's size); returns its header as found on disk.

    BadRecord when it is damaged or cut, FileNotFoundError when the segment is gone. The payload is not yet verified.
    """
    encoded = bytearray(len(encode_header(header)))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fill(descriptor, [memoryview(encoded), out.data], offset)
    finally:
        os.close(descriptor)
    return decode_header(bytes(encoded))


def _fill(descriptor: int, parts: list[memoryview], offset: int) -> None:
    while parts:
        size = os.preadv(descriptor, parts, offset)
        if size == 0:
            raise ShortRecord("the segment ends within the record")
        offset += size
        while parts and size >= len(parts[0]):
            size -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][size:]


@dataclass
class ScanResult:
    """What a scan met besides good records."""

    bad_records: int = 0
    end: int = 0
    """Where the last whole record ends: what lies behind it was cut off in the middle of a write."""


def scan_segment(path: Path, result: ScanResult) -> Iterator[tuple[int, RecordHeader]]:
    """Yields (offset, header) of each whole record; payloads are verified when they are read, not here."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        offset = 0
        while offset < size:
            try:
                header = _read_header(descriptor, offset)
            except BadRecord:
                result.bad_records += 1
                offset = _next_magic(descriptor, offset + 1, size)
                continue
            end = offset + record_bytes(header)
            if end > size:
                result.bad_records += 1
                offset = _next_magic(descriptor, offset + 1, size)
                continue
            yield offset, header
            offset = result.end = end
    finally:
        os.close(descriptor)


def _read_header(descriptor: int, offset: int) -> RecordHeader:
    fixed = os.pread(descriptor, FIXED_BYTES, offset)
    return decode_header(os.pread(descriptor, header_bytes(fixed), offset))


def _next_magic(descriptor: int, offset: int, size: int) -> int:
    while offset < size:
        chunk = os.pread(descriptor, _SEARCH_BYTES, offset)
        found = chunk.find(MAGIC)
        if found >= 0:
            return offset + found
        if len(chunk) < _SEARCH_BYTES:
            return size
        offset += len(chunk) - len(MAGIC) + 1
    return size
