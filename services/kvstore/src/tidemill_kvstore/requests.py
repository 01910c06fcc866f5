"""What callers may ask: checks of puts and gets, and their translation. Pure."""

from collections.abc import Iterable

from tidemill.mesh.v1 import kvstore_pb2
from tidemill.v1 import errors_pb2
from tidemill_kvcache.hashing import HASH_BYTES, split_hashes
from tidemill_kvstore.record import MAX_NAME_BYTES, RecordHeader
from tidemill_mesh.errors import MeshError
from tidemill_transfer.errors import TransferError

MAX_BLOCKS = 4096

_CODES: dict[str, "errors_pb2.ErrorCode.ValueType"] = {
    "peer_lost": errors_pb2.ERROR_CODE_WORKER_LOST,
    "deadline": errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    "truncated": errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
    "checksum": errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
    "unavailable": errors_pb2.ERROR_CODE_UNAVAILABLE,
}


def invalid(message: str, field: str, limit: str = "") -> MeshError:
    """INVALID_ARGUMENT for a field."""
    return MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=field, limit=limit)


def from_transfer_error(error: TransferError) -> MeshError:
    """The error that a caller is told when its bytes did not come or go."""
    return MeshError(_CODES[error.code], f"the transfer failed: {error.message}")


def deadline_of(deadline_s: float, max_deadline_s: float) -> float:
    """Seconds that a call may take."""
    if not deadline_s > 0:
        raise invalid("a call needs a deadline", "deadline_s", "more than 0 s")
    return min(deadline_s, max_deadline_s)


def hashes_of(packed: bytes) -> list[bytes]:
    """The block hashes of a request."""
    count, rest = divmod(len(packed), HASH_BYTES)
    if rest or not 1 <= count <= MAX_BLOCKS:
        raise invalid(
            f"{len(packed)} bytes are no 1 to {MAX_BLOCKS} hashes", "block_hashes", f"{HASH_BYTES} bytes each"
        )
    return split_hashes(packed)


def headers_of(blocks: Iterable[kvstore_pb2.BlockHeader], tenant: str) -> list[RecordHeader]:
    """The headers of a put's blocks."""
    headers = []
    if len(tenant.encode()) > MAX_NAME_BYTES:
        raise invalid("the tenant's name is too long", "tenant", f"{MAX_NAME_BYTES} bytes")
    for index, block in enumerate(blocks):
        where = f"blocks[{index}]"
        if len(block.block_hash) != HASH_BYTES:
            raise invalid("a block hash has the wrong length", f"{where}.block_hash", f"{HASH_BYTES} bytes")
        if len(block.parent_block_hash) not in (0, HASH_BYTES):
            raise invalid(
                "a parent hash has the wrong length", f"{where}.parent_block_hash", f"0 or {HASH_BYTES} bytes"
            )
        if block.size_bytes <= 0:
            raise invalid("a block has no bytes", f"{where}.size_bytes", "more than 0")
        if not block.kv_format or not block.shard:
            raise invalid("a block names no kv_format or no shard", where)
        if max(len(block.kv_format.encode()), len(block.shard.encode())) > MAX_NAME_BYTES:
            raise invalid("kv_format or shard is too long", where, f"{MAX_NAME_BYTES} bytes")
        headers.append(
            RecordHeader(
                block_hash=block.block_hash,
                parent_hash=block.parent_block_hash,
                kv_format=block.kv_format,
                shard=block.shard,
                size_bytes=block.size_bytes,
                checksum=block.checksum,
                has_snapshot=block.has_snapshot,
                num_tokens=max(0, block.num_tokens),
                tenant=tenant,
            )
        )
    if not 1 <= len(headers) <= MAX_BLOCKS:
        raise invalid(f"{len(headers)} blocks in one put", "blocks", f"1 to {MAX_BLOCKS} blocks")
    return headers


def to_block_header(header: RecordHeader) -> kvstore_pb2.BlockHeader:
    """A stored block's header as it is answered."""
    return kvstore_pb2.BlockHeader(
        block_hash=header.block_hash,
        parent_block_hash=header.parent_hash,
        kv_format=header.kv_format,
        shard=header.shard,
        size_bytes=header.size_bytes,
        checksum=header.checksum,
        has_snapshot=header.has_snapshot,
        num_tokens=header.num_tokens,
    )
