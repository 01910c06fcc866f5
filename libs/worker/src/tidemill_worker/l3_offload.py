"""Offload: blocks go to kvstore behind the compute, bounded, and dropped under pressure."""

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence

import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.shards import shard_name
from tidemill_mesh import request_ids
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_worker.block_source import FAILURES, MESSAGE_BYTES, first_failure
from tidemill_worker.domain import Domain
from tidemill_worker.l2 import DomainL2
from tidemill_worker.l2_slots import L2Block
from tidemill_worker.l3_lookup import look_up
from tidemill_worker.l3_stores import KvStores, Store, heads_of, storing_ranks
from tidemill_worker.pins import DomainPins
from tidemill_worker.rendezvous import split
from tidemill_worker.residents import StoredBlock
from tidemill_worker.slabs import KVShape, shape_of
from tidemill_worker.worker import Worker

log = structlog.get_logger()


class Offloader:
    """The offloads of one domain's epoch."""

    def __init__(self, worker: Worker, domain: Domain, stores: KvStores, pins: DomainPins, l2: DomainL2) -> None:
        self.in_flight = 0
        self._worker = worker
        self._domain = domain
        self._stores = stores
        self._pins = pins
        self._l2 = l2
        self._shape: KVShape = shape_of(domain.ready[0], worker.settings.block_size)
        self._batch_blocks = min(
            worker.settings.l3_batch_blocks, max(1, MESSAGE_BYTES // max(1, self._shape.block_bytes))
        )
        self._queue: deque[StoredBlock] = deque()
        self._wake = asyncio.Event()
        workers = worker.settings.l3_offloads_in_flight if worker.settings.l3_policy != "off" else 0
        self._tasks = [
            asyncio.create_task(self._work(), name=f"offload {domain.index}.{index}") for index in range(workers)
        ]

    @property
    def num_holds(self) -> int:
        """Offloads queued (as one) or under way."""
        return self.in_flight + bool(self._queue)

    @property
    def room(self) -> int:
        """Blocks that would be queued now."""
        return max(0, self._worker.settings.l3_queue_blocks - len(self._queue))

    def offer(self, blocks: Sequence[StoredBlock]) -> None:
        """Queues blocks, parents first; what does not fit is dropped and counted."""
        room = self.room
        self._queue.extend(blocks[:room])
        self._worker.counts.l3_blocks("dropped", len(blocks) - len(blocks[:room]))
        self._wake.set()

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
                # Its blocks are of several requests, so it has an id of its own, here and in the store's log.
                with request_ids.logged_as(f"offload-{secrets.token_hex(6)}"):
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
                stored = 0
                for tenant in dict.fromkeys(block.tenant for block in missing):
                    stored += await self._put(store, tenant, [block for block in missing if block.tenant == tenant])
        except FAILURES as error:
            log.warning("offload failed", store=store.name, blocks=len(blocks), error=str(first_failure(error)))
            if not _is_refusal(first_failure(error)):
                self._stores.failed(store.name)
            self._worker.counts.l3_error("put")
            self._worker.counts.l3_blocks("failed", len(blocks))
        else:
            self._worker.counts.l3_blocks("offloaded", stored)

    async def _missing(self, store: Store, blocks: list[StoredBlock]) -> list[StoredBlock]:
        """Without the blocks that the store has in whole, with their snapshots where there are some; whoever wrote
        them, and however its ranks split the heads."""
        hashes, timeout_s = [block.block_hash for block in blocks], self._worker.settings.l3_timeout_s
        held = await look_up(store, self._domain, self._shape, hashes, timeout_s)
        return [
            block
            for bit, block in enumerate(blocks)
            if not any((one.snapshots if block.has_snapshot else one.present) >> bit & 1 for one in held)
        ]

    async def _put(self, store: Store, tenant: str, blocks: list[StoredBlock]) -> int:
        """Sends the blocks from wherever they are in every rank; returns how many are stored."""
        in_l2 = {
            held.block_hash: held
            for block in blocks
            if (held := self._l2.slots.get(block.block_hash)) is not None
            and (held.snapshot_slot >= 0 or not block.has_snapshot)
        }
        from_l2 = [block for block in blocks if block.block_hash in in_l2]
        from_l1 = [block for block in blocks if block.block_hash not in in_l2]
        stored = 0
        if from_l2:
            stored += await self._put_l2(store, tenant, from_l2, [in_l2[block.block_hash] for block in from_l2])
        if from_l1:
            stored += await self._put_l1(store, tenant, from_l1)
        return stored

    async def _put_l2(self, store: Store, tenant: str, blocks: list[StoredBlock], held: list[L2Block]) -> int:
        self._l2.slots.pin(held)
        try:
            command = [block.slot for block in held], [block.snapshot_slot for block in held]
            return await self._put_ranks(store, tenant, blocks, *command, from_host=True)
        finally:
            self._l2.slots.unpin(held)

    async def _put_l1(self, store: Store, tenant: str, blocks: list[StoredBlock]) -> int:
        stored = 0
        while blocks:
            async with self._pins.hold([block.block_hash for block in blocks]) as pinned:
                held = blocks[: len(pinned.block_ids)]
                if held:
                    ids = pinned.block_ids, pinned.snapshot_ids
                    stored += await self._put_ranks(store, tenant, held, *ids, from_host=False)
            # The block after those that were found has left L1.
            self._worker.counts.l3_blocks("gone", int(len(held) < len(blocks)))
            blocks = blocks[len(held) + 1 :]
        return stored

    async def _put_ranks(
        self,
        store: Store,
        tenant: str,
        blocks: list[StoredBlock],
        block_ids: list[int],
        snapshot_ids: list[int],
        *,
        from_host: bool,
    ) -> int:
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(self._put_rank(store, tenant, rank, blocks, block_ids, snapshot_ids, from_host))
                for rank in storing_ranks(self._domain.ready, self._shape.num_heads)
            ]
        return min(task.result() for task in puts)

    async def _put_rank(
        self,
        store: Store,
        tenant: str,
        rank: messages.RankReady,
        blocks: list[StoredBlock],
        block_ids: list[int],
        snapshot_ids: list[int],
        from_host: bool,
    ) -> int:
        """One rank's shard of the blocks in one message. The checksum is the store's to compute: ours is only known
        once the bytes are out, and the transfer guards them on the way."""
        heads = (rank.head_start, rank.head_end)
        headers = [
            self._header(rank, block, snapshot_id >= 0) for block, snapshot_id in zip(blocks, snapshot_ids, strict=True)
        ]
        tag, deadline_s = new_tag(), self._worker.settings.l3_timeout_s
        request = kvstore_pb2.PutRequest(
            blocks=headers,
            source_address=rank.transfer_address,
            first_tag=tag,
            tenant=tenant,
            deadline_s=deadline_s,
            contiguous=True,
        )
        piece = messages.PieceSpec(store.transfer_address, tag, *heads, sum(header.size_bytes for header in headers))
        command = messages.SendKV(
            transfer_id=0,
            block_ids=block_ids,
            piece=piece,
            deadline_s=deadline_s,
            snapshot_ids=snapshot_ids,
            per_block_snapshots=True,
            from_host=from_host,
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
            shard=shard_name(heads_of(rank), self._shape.num_heads),
            size_bytes=self._shape.piece_bytes(
                1, (rank.head_start, rank.head_end), with_sequence=False, snapshots=int(has_snapshot)
            ),
            has_snapshot=has_snapshot,
            num_tokens=self._shape.block_size,
        )


def _is_refusal(error: BaseException) -> bool:
    """A store that takes no more blocks still gives those that it has."""
    return isinstance(error, MeshError) and error.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED


async def _call_put(store: Store, request: kvstore_pb2.PutRequest) -> kvstore_pb2.PutResponse:
    metadata = request_ids.outgoing()
    response: kvstore_pb2.PutResponse = await store.stub.Put(request, timeout=request.deadline_s, metadata=metadata)
    if response.HasField("error"):
        raise MeshError.from_detail(response.error)
    return response
