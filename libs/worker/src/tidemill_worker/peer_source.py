"""Another instance's memory as a source of blocks: it sends over the transfer agent what it holds in L1 or L2."""

import asyncio
import time
from collections.abc import Sequence

from tidemill.mesh.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.kv_format import keeps_precision
from tidemill_mesh import request_ids
from tidemill_mesh.errors import MeshError
from tidemill_transfer.checksum import agree
from tidemill_worker.block_source import MESSAGE_BYTES
from tidemill_worker.domain import Domain
from tidemill_worker.landing import Landing
from tidemill_worker.rendezvous import chunks
from tidemill_worker.slabs import KVShape, layout_of
from tidemill_worker.source_plan import Offer
from tidemill_worker.worker import Worker

LATENCY_S = 0.006


class PeerSource:
    """One instance that a placement named, for one onboarding; it may hold less by now."""

    def __init__(self, worker: Worker, domain: Domain, source: common_pb2.BlockSource, landing: Landing) -> None:
        self._worker = worker
        self._domain = domain
        self._holder = source.holder
        depth = source.num_blocks - landing.wanted.first_block
        places = landing.snapshot_ids(range(landing.num_blocks))
        # What a placement names ends with a snapshot; of others before it nothing is known. An older router names
        # blocks only: then any boundary may have one.
        last = depth - 1 if 0 < depth <= landing.num_blocks and places[depth - 1] >= 0 else -1
        name = f"peer {source.holder.domain.instance}"
        self._offer = Offer(
            name,
            [index < depth for index in range(landing.num_blocks)],
            [place >= 0 and (index == last if last >= 0 else index < depth) for index, place in enumerate(places)],
            LATENCY_S,
            worker.rates.bytes_per_s(name, worker.transfers.bytes_per_s),
        )

    @property
    def offer(self) -> Offer:
        return self._offer

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        size = max(1, MESSAGE_BYTES // max(1, landing.shape.block_bytes))
        started = time.monotonic()
        for part in chunks(indices, size):
            sent = await PeerFetch(self._worker, self._domain, landing, part).run(self._holder, deadline_s)
            if sent < len(part):
                return
        seconds = time.monotonic() - started - LATENCY_S
        self._worker.rates.measured(self._offer.name, len(indices) * landing.shape.block_bytes, seconds)


class PeerFetch:
    """One FetchBlocks call."""

    def __init__(self, worker: Worker, domain: Domain, landing: Landing, indices: Sequence[int]) -> None:
        self._worker = worker
        self._domain = domain
        self._landing = landing
        self._indices = indices
        self._places: list[int] = []
        self._receives: list[asyncio.Task[messages.TransferDone]] = []

    async def run(self, holder: common_pb2.Target, deadline_s: float) -> int:
        """Leading blocks that have landed; raises what FAILURES names."""
        request = transfer_pb2.FetchBlocksRequest(
            block_hashes=join_hashes(self._landing.hashes(self._indices)),
            layout=layout_of(self._domain.ready, self._worker.settings.block_size),
            deadline_s=deadline_s,
        )
        stub = transfer_pb2_grpc.TransferServiceStub(self._worker.channels.get(holder.endpoint))
        call = stub.FetchBlocks(request, timeout=deadline_s, metadata=request_ids.outgoing())
        checksums: list[int] = []
        try:
            async with asyncio.TaskGroup() as group:
                async for response in call:
                    if response.HasField("error"):
                        raise MeshError.from_detail(response.error)
                    if response.pieces:
                        self._receive(response, group, deadline_s)
                    checksums += response.checksums
        finally:
            call.cancel()
        if not agree(checksums, [task.result().checksum for task in self._receives]):
            self._worker.counts.peer_blocks("damaged", len(self._places))
            raise self._worker.arrived_damaged(holder.domain.instance)
        count = len(self._places)
        self._landing.landed(self._indices[:count], self._places, "peer")
        return count

    def _receive(self, response: transfer_pb2.FetchBlocksResponse, group: asyncio.TaskGroup, deadline_s: float) -> None:
        own, source = self._domain.ready[0], response.source_layout
        if not keeps_precision(source.kv_format, own.kv_format):
            raise MeshError(errors_pb2.ERROR_CODE_UNSUPPORTED, f"KV of format {source.kv_format!r} does not fit")
        sent = self._indices[: response.num_blocks]
        bits = int.from_bytes(response.snapshot_bitmap, "little")
        self._places = self._landing.places_of(sent, [bool(bits >> bit & 1) for bit in range(len(sent))])
        shape = KVShape(self._landing.shape.groups, self._landing.shape.block_size, source.dtype)
        addresses = {rank.rank: rank.transfer_address for rank in source.ranks}
        num_snapshots = sum(place >= 0 for place in self._places)
        for piece in response.pieces:
            heads = (piece.head_start, piece.head_end)
            size = shape.piece_bytes(len(sent), heads, with_sequence=False, snapshots=num_snapshots)
            if size != piece.size_bytes:
                raise MeshError(
                    errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"a piece has {piece.size_bytes} bytes instead of {size}"
                )
            command = messages.RecvKV(
                transfer_id=0,
                block_ids=self._landing.block_ids(sent),
                piece=messages.PieceSpec(addresses[piece.source_rank], piece.tag, *heads, size),
                deadline_s=deadline_s,
                source_dtype=source.dtype,
                snapshot_ids=self._places,
                per_block_snapshots=True,
            )
            self._receives.append(
                group.create_task(self._worker.transfers.recv_kv(self._domain, piece.dest_rank, command))
            )
