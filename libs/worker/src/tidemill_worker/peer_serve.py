"""The other side of PeerSource: blocks of this instance's L1 or L2 are sent to whoever can name them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from tidemill.mesh.v1 import transfer_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.hashing import split_hashes
from tidemill_kvcache.kv_format import keeps_precision
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_transfer.plan import HeadPiece, plan_pieces
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.l2_slots import L2Block
from tidemill_worker.slabs import layout_of, shape_of
from tidemill_worker.worker import Worker


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks that stay where they are while they are sent."""

    block_ids: list[int]
    snapshot_ids: list[int]
    from_host: bool


async def serve_blocks(
    worker: Worker, tiers: Sequence[DomainTiers], request: transfer_pb2.FetchBlocksRequest
) -> AsyncIterator[transfer_pb2.FetchBlocksResponse]:
    """The answer to FetchBlocks: what is sent, then its checksums."""
    try:
        hashes = split_hashes(request.block_hashes)
    except ValueError as error:
        raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, str(error), field="block_hashes") from error
    if not hashes or not request.deadline_s > 0:
        raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "blocks and a deadline are needed")
    held = max(tiers, key=lambda domain: max(domain.reach(hashes)), default=None)
    if held is None or not held.depth(hashes):
        yield transfer_pb2.FetchBlocksResponse()
        return
    if not keeps_precision(held.domain.ready[0].kv_format, request.layout.kv_format):
        raise MeshError(
            errors_pb2.ERROR_CODE_UNSUPPORTED, "KV of this precision is not held here", field="layout.kv_format"
        )
    layout = layout_of(held.domain.ready, worker.settings.block_size)
    pieces = plan_pieces(layout, request.layout)
    deadline_s = min(request.deadline_s, worker.settings.transfer_timeout_s)
    async with _hold(held, hashes, pieces) as blocks:
        if not blocks.block_ids:
            yield transfer_pb2.FetchBlocksResponse()
            return
        announced = _announce(worker, held, layout, pieces, blocks)
        yield announced
        if held.ended:
            # While the taker was slow to listen; the ids name other blocks in the next epoch.
            raise MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "the rank that held the blocks is gone")
        sent = await _send(worker, held, announced, request.layout, blocks, deadline_s)
    yield transfer_pb2.FetchBlocksResponse(checksums=[done.checksum for done in sent])
    worker.counts.peer_blocks("sent", announced.num_blocks)


def _hold(
    held: DomainTiers, hashes: Sequence[bytes], pieces: Sequence[HeadPiece]
) -> AbstractAsyncContextManager[HeldBlocks]:
    """From L1, or from L2 where that has more to resume from and the pieces are whole ranks."""
    in_l1, in_l2 = held.reach(hashes)
    heads = {rank.rank: (rank.head_start, rank.head_end) for rank in held.domain.ready}
    whole = all(heads[piece.source_rank] == (piece.head_start, piece.head_end) for piece in pieces)
    if whole and in_l2 > in_l1:
        return _hold_l2(held, held.l2.leading(hashes))
    return _hold_l1(held, hashes)


@asynccontextmanager
async def _hold_l1(held: DomainTiers, hashes: Sequence[bytes]) -> AsyncIterator[HeldBlocks]:
    async with held.pins.hold(hashes) as pinned:
        yield HeldBlocks(pinned.block_ids, pinned.snapshot_ids, from_host=False)


@asynccontextmanager
async def _hold_l2(held: DomainTiers, blocks: Sequence[L2Block]) -> AsyncIterator[HeldBlocks]:
    held.l2.slots.pin(blocks)
    try:
        yield HeldBlocks([b.slot for b in blocks], [b.snapshot_slot for b in blocks], from_host=True)
    finally:
        held.l2.slots.unpin(blocks)


def _announce(
    worker: Worker,
    held: DomainTiers,
    layout: transfer_pb2.KVLayout,
    pieces: Sequence[HeadPiece],
    blocks: HeldBlocks,
) -> transfer_pb2.FetchBlocksResponse:
    shape = shape_of(held.domain.ready[0], worker.settings.block_size)
    bits = sum(1 << bit for bit, snapshot_id in enumerate(blocks.snapshot_ids) if snapshot_id >= 0)
    count = len(blocks.block_ids)
    return transfer_pb2.FetchBlocksResponse(
        source_layout=layout,
        num_blocks=count,
        snapshot_bitmap=bits.to_bytes((count + 7) // 8, "little"),
        pieces=[
            transfer_pb2.Piece(
                source_rank=source_rank,
                dest_rank=dest_rank,
                tag=new_tag(),
                size_bytes=shape.piece_bytes(count, (start, end), with_sequence=False, snapshots=bits.bit_count()),
                head_start=start,
                head_end=end,
            )
            for source_rank, dest_rank, start, end in pieces
        ],
    )


async def _send(
    worker: Worker,
    held: DomainTiers,
    announced: transfer_pb2.FetchBlocksResponse,
    dest: transfer_pb2.KVLayout,
    blocks: HeldBlocks,
    deadline_s: float,
) -> list[messages.TransferDone]:
    addresses = {rank.rank: rank.transfer_address for rank in dest.ranks}
    sends = []
    async with asyncio.TaskGroup() as group:
        for piece in announced.pieces:
            heads = (piece.head_start, piece.head_end)
            command = messages.SendKV(
                transfer_id=0,
                block_ids=blocks.block_ids,
                piece=messages.PieceSpec(addresses[piece.dest_rank], piece.tag, *heads, piece.size_bytes),
                deadline_s=deadline_s,
                snapshot_ids=blocks.snapshot_ids,
                per_block_snapshots=True,
                from_host=blocks.from_host,
            )
            send = worker.transfers.send_kv(held.domain, piece.source_rank, command)
            sends.append(group.create_task(send))
    return [send.result() for send in sends]
