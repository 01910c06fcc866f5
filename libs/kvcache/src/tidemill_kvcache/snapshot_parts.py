"""Long lists of blocks in messages of bounded size: the answer to GetSnapshot, and events of long runs."""

from collections.abc import Iterable, Iterator

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import BlockStored
from tidemill.mesh.v1.worker_pb2 import GetSnapshotResponse
from tidemill_kvcache.hashing import HASH_BYTES

MAX_HASHES = 16384
"""Of one event or snapshot message: 256 KiB, well below the limits of NATS and gRPC."""


def snapshot_parts(
    domain: DomainRef, sequence: int, runs: Iterable[BlockStored], model_revision: str = ""
) -> Iterator[GetSnapshotResponse]:
    """All blocks as of one sequence; the last message says so."""

    def empty() -> GetSnapshotResponse:
        return GetSnapshotResponse(domain=domain, sequence=sequence, model_revision=model_revision)

    message, num_hashes = empty(), 0
    for run in runs:
        for piece in cut(run):
            count = len(piece.block_hashes) // HASH_BYTES
            if num_hashes + count > MAX_HASHES:
                yield message
                message, num_hashes = empty(), 0
            message.blocks.append(piece)
            num_hashes += count
    message.last = True
    yield message


def cut(run: BlockStored) -> Iterator[BlockStored]:
    """The run in pieces that each continue the one before."""
    parent, step = run.parent_block_hash, MAX_HASHES * HASH_BYTES
    for start in range(0, len(run.block_hashes), step):
        hashes = run.block_hashes[start : start + step]
        yield BlockStored(
            parent_block_hash=parent,
            block_hashes=hashes,
            tier=run.tier,
            kv_format_id=run.kv_format_id,
            # A whole number of bytes for each piece.
            snapshot_bitmap=run.snapshot_bitmap[start // step * MAX_HASHES // 8 :][: MAX_HASHES // 8],
        )
        parent = hashes[-HASH_BYTES:]
