"""Names of objects: each tells all that the index must know of its block, so that a listing rebuilds it. Pure.

<prefix>/formats/<digest>                                   body: the kv_format's name
<prefix>/blocks/<digest>/<shard>/<hash>.<parent>.<checksum>.<snapshot>.<tokens>.<payload bytes>.<tenant>
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping

from tidemill_kvcache.kv_format import format_id
from tidemill_kvstore.record import RecordHeader

FORMATS, BLOCKS = "formats", "blocks"


def format_digest(kv_format: str) -> str:
    """A short name of a kv_format, whose own may be longer than a key."""
    return f"{format_id(kv_format):016x}"


def block_name(header: RecordHeader) -> str:
    """The key of a block, below the prefix."""
    tenant = urlsafe_b64encode(header.tenant.encode()).decode().rstrip("=")
    fields = (
        header.block_hash.hex(),
        header.parent_hash.hex(),
        f"{header.checksum:016x}",
        str(int(header.has_snapshot)),
        str(header.num_tokens),
        str(header.size_bytes),
        tenant,
    )
    return f"{BLOCKS}/{format_digest(header.kv_format)}/{header.shard}/{'.'.join(fields)}"


def parse_block_name(name: str, formats: Mapping[str, str]) -> RecordHeader | None:
    """What a key says; None for one that is not a block's, or of a format that is not known."""
    try:
        kind, digest, shard, fields = name.split("/")
        block_hash, parent, checksum, snapshot, tokens, size, tenant = fields.split(".")
        header = RecordHeader(
            block_hash=bytes.fromhex(block_hash),
            parent_hash=bytes.fromhex(parent),
            kv_format=formats[digest],
            shard=shard,
            size_bytes=int(size),
            checksum=int(checksum, 16),
            has_snapshot=snapshot == "1",
            num_tokens=int(tokens),
            tenant=urlsafe_b64decode(tenant + "=" * (-len(tenant) % 4)).decode(),
        )
    except (ValueError, KeyError):
        return None
    return header if kind == BLOCKS else None
