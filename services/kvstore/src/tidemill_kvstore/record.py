"""One block on disk: a header that proves itself, then the bytes it speaks of. Pure.

| magic 4 | version u16 | flags u16 | format length u16 | shard length u16 | tokens u32 | payload length u64 |
| payload checksum u64 | block hash 16 | parent hash 16 | tenant length u16 | kv_format | shard | tenant |
| header checksum u64 | payload |

Version 1 had no tenant; its records are still read.
"""

import struct
from dataclasses import dataclass

from tidemill_kvcache.hashing import HASH_BYTES
from tidemill_transfer.checksum import checksum64

MAGIC = b"TMKV"
VERSION = 2

_FIXED = {1: struct.Struct("<4sHHHHIQQ16s16s"), 2: struct.Struct("<4sHHHHIQQ16s16sH")}
_BEGIN = struct.Struct("<4sH")
_CHECKSUM = struct.Struct("<Q")
_HAS_SNAPSHOT = 1
_HAS_PARENT = 2

FIXED_BYTES = _FIXED[VERSION].size
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
    tenant: str = ""
    version: int = VERSION

    @property
    def scope(self) -> tuple[str, str]:
        return self.kv_format, self.shard


def encode_header(header: RecordHeader) -> bytes:
    """The header as it is written."""
    names = [header.kv_format.encode(), header.shard.encode()]
    if header.version > 1:
        names.append(header.tenant.encode())
    flags = (_HAS_SNAPSHOT if header.has_snapshot else 0) | (_HAS_PARENT if header.parent_hash else 0)
    fixed = _FIXED[header.version].pack(
        MAGIC,
        header.version,
        flags,
        len(names[0]),
        len(names[1]),
        header.num_tokens,
        header.size_bytes,
        header.checksum,
        header.block_hash,
        header.parent_hash.ljust(HASH_BYTES, b"\0"),
        *(len(name) for name in names[2:]),
    )
    body = fixed + b"".join(names)
    return body + _CHECKSUM.pack(checksum64(body))


def header_bytes(fixed: bytes) -> int:
    """Length of the whole header whose first FIXED_BYTES these are; BadRecord when they are not a header's."""
    if len(fixed) < FIXED_BYTES:
        raise ShortRecord("the record ends within its header")
    layout = _layout(fixed)
    _, _, _, format_bytes, shard_bytes, _, _, _, _, _, *tenant_bytes = layout.unpack_from(fixed)
    return layout.size + int(format_bytes + shard_bytes + sum(tenant_bytes)) + _CHECKSUM.size


def decode_header(encoded: bytes) -> RecordHeader:
    """Reads a whole header; BadRecord unless every byte is as it was written."""
    length = header_bytes(encoded)
    if len(encoded) < length:
        raise ShortRecord("the record ends within its header")
    body = encoded[: length - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(encoded, len(body))[0] != checksum64(body):
        raise BadRecord("the header is damaged")
    layout = _layout(body)
    fields = layout.unpack_from(body)
    version, flags, format_bytes, shard_bytes, num_tokens, size_bytes, checksum, block_hash, parent = fields[1:10]
    names = body[layout.size :]
    try:
        kv_format = names[:format_bytes].decode()
        shard = names[format_bytes : format_bytes + shard_bytes].decode()
        tenant = names[format_bytes + shard_bytes :].decode()
    except UnicodeDecodeError as error:
        raise BadRecord("a name is no text") from error
    return RecordHeader(
        block_hash=block_hash,
        parent_hash=parent if flags & _HAS_PARENT else b"",
        kv_format=kv_format,
        shard=shard,
        size_bytes=size_bytes,
        checksum=checksum,
        has_snapshot=bool(flags & _HAS_SNAPSHOT),
        num_tokens=num_tokens,
        tenant=tenant,
        version=version,
    )


def _layout(encoded: bytes) -> struct.Struct:
    """The fixed part of a header that begins like this."""
    magic, version = _BEGIN.unpack_from(encoded)
    if magic != MAGIC:
        raise BadRecord("no record begins here")
    layout = _FIXED.get(version)
    if layout is None:
        raise BadRecord(f"version {version} is not known here")
    return layout
