"""Write-through offload: newly stored blocks go to kvstore behind the compute, bounded, and dropped under pressure."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_worker.domain import Domain
from tidemill_worker.l3_stores import MESSAGE_BYTES, KvStores, Store, shard_name
from tidemill_worker.rendezvous import split
from tidemill_worker.slabs import KVShape, shape_of
from tidemill_worker.worker import Worker

log = structlog.get_logger()

PIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StoredBlock:
    """A block that became reusable in L1."""

    parent: bytes
    block_hash: bytes
    has_snapshot: bool


class Offloader:
    """The offloads of one domain's epoch."""

    def __init__(self, worker: Worker, domain: Domain, stores: KvStores) -> None:
        self.in_flight = 0
        self._worker = worker
        self._domain = domain
        self._stores = stores
        self._shape: KVShape = shape_of(domain.ready[0], worker.settings.block_size)
        self._batch_blocks = min(
            worker.settings.l3_batch_blocks, max(1, MESSAGE_BYTES // max(1, self._shape.block_bytes))
        )
        self._queue: deque[StoredBlock] = deque()
        self._wake = asyncio.Event()
        self._pin_ids = itertools.count(1)
        self._pins: dict[int, asyncio.Future[messages.BlocksPinned]] = {}
        self._tasks = [
            asyncio.create_task(self._work(), name=f"offload {domain.index}.{index}")
            for index in range(worker.settings.l3_offloads_in_flight)
        ]

    @property
    def num_holds(self) -> int:
        """Offloads queued (as one) or under way."""
        return self.in_flight + bool(self._queue)

    def stored(self, event: messages.BlocksStored) -> None:
        """Queues a run; what does not fit is dropped and counted."""
        parents = [event.parent_hash, *event.block_hashes]
        room = self._worker.settings.l3_queue_blocks - len(self._queue)
        blocks = [
            StoredBlock(parent, block_hash, has_snapshot)
            for parent, block_hash, has_snapshot in zip(parents, event.block_hashes, event.has_snapshot, strict=False)
        ]
        self._queue.extend(blocks[:room])
        self._worker.counts.l3_blocks("dropped", len(blocks) - max(0, min(room, len(blocks))))
        self._wake.set()

    def pinned(self, report: messages.BlocksPinned) -> None:
        """The leader's answer to PinBlocks."""
        future = self._pins.get(report.pin_id)
        if future is not None and not future.done():
            future.set_result(report)

    async def close(self) -> None:
        """Ends all offloads."""
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            count = min(len(self._queue), self._batch_blocks)
            batch = [self._queue.popleft() for _ in range(count)]
            self.in_flight += 1
            try:
                await self._offload(batch)
            except Exception as error:
                log.error("offload failed unexpectedly", domain=self._domain.index, exc_info=error)
                self._worker.counts.l3_blocks("failed", len(batch))
            finally:
                self.in_flight -= 1

    async def _offload(self, batch: Sequence[StoredBlock]) -> None:
        stores = self._stores.usable()
        if not stores:
            self._worker.counts.l3_blocks("no_store", len(batch))
            return
        shares = split([block.block_hash for block in batch], list(stores))
        for name, indices in shares.items():
            await self._offload_share(stores[name], [batch[index] for index in indices])

    async def _offload_share(self, store: Store, blocks: list[StoredBlock]) -> None:
        try:
            async with asyncio.timeout(self._worker.settings.l3_timeout_s):
                missing = await self._missing(store, blocks)
                self._worker.counts.l3_blocks("present", len(blocks) - len(missing))
                stored = await self._put(store, missing) if missing else 0
        except (grpc.aio.AioRpcError, MeshError, TimeoutError, ExceptionGroup) as error:
            reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            log.warning("offload failed", store=store.name, blocks=len(blocks), error=str(reason))
            self._stores.failed(store.name)
            self._worker.counts.l3_error("put")
            self._worker.counts.l3_blocks("failed", len(blocks))
        else:
            self._worker.counts.l3_blocks("offloaded", stored)

    async def _missing(self, store: Store, blocks: list[StoredBlock]) -> list[StoredBlock]:
        """Without the leading blocks that the store has for every rank, with their snapshots where there are some."""
        hashes = b"".join(block.block_hash for block in blocks)
        present = len(blocks)
        for rank in self._domain.ready:
            request = kvstore_pb2.HasRequest(
                kv_format=rank.kv_format, shard=shard_name(rank, self._shape.num_heads), block_hashes=hashes
            )
            answer = await store.stub.Has(request, timeout=self._worker.settings.l3_timeout_s)
            present = min(present, answer.num_blocks, _first_without_snapshot(blocks, answer.snapshot_bitmap))
        return blocks[present:]

    async def _put(self, store: Store, blocks: list[StoredBlock]) -> int:
        """Pins the blocks, sends them from every rank; returns how many are stored."""
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = asyncio.get_running_loop().create_future()
        self._domain.send(messages.PinBlocks(pin_id, [block.block_hash for block in blocks]))
        try:
            async with asyncio.timeout(PIN_TIMEOUT_S):
                pinned = await self._pins[pin_id]
            blocks = blocks[: len(pinned.block_ids)]
            if not blocks:
                return 0
            async with asyncio.TaskGroup() as group:
                puts = [group.create_task(self._put_rank(store, rank, blocks, pinned)) for rank in self._domain.ready]
            return min(task.result() for task in puts)
        finally:
            del self._pins[pin_id]
            self._domain.send(messages.UnpinBlocks(pin_id))

    async def _put_rank(
        self, store: Store, rank: messages.RankReady, blocks: list[StoredBlock], pinned: messages.BlocksPinned
    ) -> int:
        """One rank's shard of the blocks in one message. The checksum is the store's to compute: ours is only known
        once the bytes are out, and the transfer guards them on the way."""
        heads = (rank.head_start, rank.head_end)
        headers = [
            self._header(rank, block, snapshot_id >= 0)
            for block, snapshot_id in zip(blocks, pinned.snapshot_ids, strict=True)
        ]
        tag, deadline_s = new_tag(), self._worker.settings.l3_timeout_s
        request = kvstore_pb2.PutRequest(
            blocks=headers,
            source_address=rank.transfer_address,
            first_tag=tag,
            deadline_s=deadline_s,
            contiguous=True,
        )
        piece = messages.PieceSpec(store.transfer_address, tag, *heads, sum(header.size_bytes for header in headers))
        command = messages.SendKV(
            transfer_id=0,
            block_ids=pinned.block_ids,
            piece=piece,
            deadline_s=deadline_s,
            snapshot_ids=pinned.snapshot_ids,
            per_block_snapshots=True,
        )
        async with asyncio.TaskGroup() as group:
            put = group.create_task(_call_put(store, request))
            group.create_task(self._worker.transfers.send_kv(self._domain, rank.rank, command))
        return sum(put.result().stored)

    def _header(self, rank: messages.RankReady, block: StoredBlock, has_snapshot: bool) -> kvstore_pb2.BlockHeader:
        return kvstore_pb2.BlockHeader(
            block_hash=block.block_hash,
            parent_block_hash=block.parent,
            kv_format=rank.kv_format,
            shard=shard_name(rank, self._shape.num_heads),
            size_bytes=self._shape.piece_bytes(
                1, (rank.head_start, rank.head_end), with_sequence=False, snapshots=int(has_snapshot)
            ),
            has_snapshot=has_snapshot,
            num_tokens=self._shape.block_size,
        )


async def _call_put(store: Store, request: kvstore_pb2.PutRequest) -> kvstore_pb2.PutResponse:
    response: kvstore_pb2.PutResponse = await store.stub.Put(request, timeout=request.deadline_s)
    if response.HasField("error"):
        raise MeshError.from_detail(response.error)
    return response


def _first_without_snapshot(blocks: Sequence[StoredBlock], bitmap: bytes) -> int:
    bits = int.from_bytes(bitmap, "little")
    wanted = (index for index, block in enumerate(blocks) if block.has_snapshot and not bits >> index & 1)
    return next(wanted, len(blocks))
