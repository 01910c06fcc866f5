"""One block on disk: a header that proves itself, then the bytes it speaks of. Pure.

| magic 4 | version u16 | flags u16 | format length u16 | shard length u16 | tokens u32 | payload length u64 |
| payload checksum u64 | block hash 16 | parent hash 16 | kv_format | shard | header checksum u64 | payload |
"""

import struct
from dataclasses import dataclass

from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_transfer.checksum import checksum64

MAGIC = b"TMKV"
VERSION = 1

_FIXED = struct.Struct("<4sHHHHIQQ16s16s")
_CHECKSUM = struct.Struct("<Q")
_HAS_SNAPSHOT = 1
_HAS_PARENT = 2

FIXED_BYTES = _FIXED.size
MAX_NAME_BYTES = 0xFFFF


class BadRecord(Exception):
    """The bytes are no header of ours, or a damaged one."""


class ShortRecord(BadRecord):
    """The bytes end before the header does."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a stored block is; (kv_format, shard, block_hash) names it."""

    block_hash: bytes
    parent_hash: bytes
    kv_format: str
    shard: str
    size_bytes: int
    checksum: int
    has_snapshot: bool
    num_tokens: int

    @property
    def scope(self) -> tuple[str, str]:
        return self.kv_format, self.shard


def encode_header(header: RecordHeader) -> bytes:
    """The header as it is written."""
    names = header.kv_format.encode(), header.shard.encode()
    flags = (_HAS_SNAPSHOT if header.has_snapshot else 0) | (_HAS_PARENT if header.parent_hash else 0)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        flags,
        len(names[0]),
        len(names[1]),
        header.num_tokens,
        header.size_bytes,
        header.checksum,
        header.block_hash,
        header.parent_hash.ljust(HASH_BYTES, b"\0"),
    )
    body = fixed + names[0] + names[1]
    return body + _CHECKSUM.pack(checksum64(body))


def header_bytes(fixed: bytes) -> int:
    """Length of the whole header whose first FIXED_BYTES these are; BadRecord when they are not a header's."""
    if len(fixed) < FIXED_BYTES:
        raise ShortRecord("the record ends within its header")
    magic, version, _, format_bytes, shard_bytes, *_ = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise BadRecord("no record begins here")
    if version != VERSION:
        raise BadRecord(f"version {version} is not known here")
    return FIXED_BYTES + int(format_bytes) + int(shard_bytes) + _CHECKSUM.size


def decode_header(encoded: bytes) -> RecordHeader:
    """Reads a whole header; BadRecord unless every byte is as it was written."""
    length = header_bytes(encoded)
    if len(encoded) < length:
        raise ShortRecord("the record ends within its header")
    body = encoded[: length - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(encoded, len(body))[0] != checksum64(body):
        raise BadRecord("the header is damaged")
    _, _, flags, format_bytes, _, num_tokens, size_bytes, checksum, block_hash, parent = _FIXED.unpack_from(body)
    names = body[FIXED_BYTES:]
    return RecordHeader(
        block_hash=block_hash,
        parent_hash=parent if flags & _HAS_PARENT else b"",
        kv_format=names[:format_bytes].decode(),
        shard=names[format_bytes:].decode(),
        size_bytes=size_bytes,
        checksum=checksum,
        has_snapshot=bool(flags & _HAS_SNAPSHOT),
        num_tokens=num_tokens,
    )
