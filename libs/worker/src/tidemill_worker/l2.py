"""L2 of one domain: blocks are copied down from L1 behind the compute, and back up when a prompt needs them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from tidemill_engine import messages
from tidemill_kvcache.runs import CacheEvent
from tidemill_mesh.errors import MeshError
from tidemill_worker.domain import Domain
from tidemill_worker.l2_slots import L2Block, L2Slots
from tidemill_worker.pins import DomainPins
from tidemill_worker.residents import StoredBlock
from tidemill_worker.worker import Worker

log = structlog.get_logger()

SAVE_BATCH_BLOCKS = 32
SAVE_TIMEOUT_S = 5.0
QUEUE_BLOCKS = 4096

Reserved = tuple[L2Block, int, int]
"""A reserved block, and the pool block and snapshot that fill it."""


class DomainL2:
    """The L2 of one domain's epoch; a domain without host memory has one without slots."""

    def __init__(
        self, worker: Worker, domain: Domain, pins: DomainPins, tell: Callable[[Domain, list[CacheEvent]], None]
    ) -> None:
        self.slots = L2Slots(
            min(rank.num_host_blocks for rank in domain.ready), min(rank.num_host_snapshots for rank in domain.ready)
        )
        self.saving = 0
        self._worker = worker
        self._domain = domain
        self._pins = pins
        self._tell = tell
        self._queue: deque[StoredBlock] = deque()
        self._wake = asyncio.Event()
        self._evicted = 0
        self._task = asyncio.create_task(self._work(), name=f"L2 {domain.index}") if self.enabled else None

    @property
    def enabled(self) -> bool:
        """Whether there is host memory."""
        return self.slots.num_slots > 0

    @property
    def num_holds(self) -> int:
        """Copies under way, with those that wait (as one)."""
        return self.saving + bool(self._queue)

    def offer(self, blocks: Sequence[StoredBlock]) -> None:
        """Queues blocks of L1 to be copied; what does not fit is dropped and counted."""
        if not self.enabled:
            return
        wanted = [block for block in blocks if self.slots.lacks(block)]
        room = max(0, QUEUE_BLOCKS - len(self._queue))
        self._queue.extend(wanted[:room])
        self._worker.counts.l2_blocks("dropped", len(wanted) - len(wanted[:room]))
        self._wake.set()

    def leading(self, hashes: Sequence[bytes]) -> list[L2Block]:
        """The leading run of these blocks."""
        run = []
        for block_hash in hashes:
            block = self.slots.get(block_hash)
            if block is None:
                break
            run.append(block)
        return run

    async def load(
        self, blocks: Sequence[L2Block], block_ids: Sequence[int], snapshot_ids: Sequence[int], deadline_s: float
    ) -> int:
        """Copies blocks to L1; returns how many leading ones every rank has in place. A damaged one is dropped."""
        self.slots.pin(blocks)
        try:
            commands = [_load_command(blocks, block_ids, snapshot_ids, deadline_s) for _ in self._domain.ready]
            copies = [
                self._worker.transfers.load_host(self._domain, rank.rank, command)
                for rank, command in zip(self._domain.ready, commands, strict=True)
            ]
            answers = await asyncio.gather(*copies, return_exceptions=True)
        finally:
            self.slots.unpin(blocks)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        good = min(answer.good_blocks for answer in answers if isinstance(answer, messages.TransferDone))
        self.slots.touch(blocks[:good])
        if good < len(blocks):
            self._worker.counts.l2_blocks("damaged", 1)
            self.slots.drop(blocks[good])
            self.publish()
        return good

    def publish(self) -> None:
        """Tells the mesh what came and went."""
        events = self.slots.take_events()
        if events:
            self._tell(self._domain, events)
        self._worker.counts.l2_blocks("evicted", self.slots.evicted_blocks - self._evicted)
        self._evicted = self.slots.evicted_blocks

    def cleared(self) -> None:
        """The cache was reset; the mesh is told so for all tiers at once."""
        self._queue.clear()
        self.slots.clear()

    async def close(self) -> None:
        """Ends the copying."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), SAVE_BATCH_BLOCKS))]
            self.saving += 1
            try:
                rest = await self._save([block for block in batch if self.slots.lacks(block)])
                self._queue.extendleft(reversed(rest))
            except (MeshError, TimeoutError) as error:
                log.warning("copying to L2 failed", domain=self._domain.index, error=str(error))
                self._worker.counts.l2_blocks("failed", len(batch))
            except Exception as error:
                log.error("copying to L2 failed unexpectedly", domain=self._domain.index, exc_info=error)
                self._worker.counts.l2_blocks("failed", len(batch))
            finally:
                self.saving -= 1
                self.publish()

    async def _save(self, blocks: list[StoredBlock]) -> list[StoredBlock]:
        """Copies what L1 still has of the blocks; returns those after a block that has left it."""
        if not blocks:
            return []
        async with self._pins.hold([block.block_hash for block in blocks]) as pinned:
            reserved = self._reserve(blocks[: len(pinned.block_ids)], pinned)
            if reserved:
                await self._fill(reserved)
        missed = len(pinned.block_ids) < len(blocks)
        self._worker.counts.l2_blocks("gone", int(missed))
        return blocks[len(pinned.block_ids) + 1 :]

    def _reserve(self, blocks: Sequence[StoredBlock], pinned: messages.BlocksPinned) -> list[Reserved]:
        reserved = []
        for block, block_id, snapshot_id in zip(blocks, pinned.block_ids, pinned.snapshot_ids, strict=True):
            if not self.slots.lacks(block):
                continue
            made = self.slots.reserve(block, with_snapshot=snapshot_id >= 0)
            if made is None:
                self._worker.counts.l2_blocks("no_room", 1)
                continue
            reserved.append((made, block_id, snapshot_id))
        return reserved

    async def _fill(self, reserved: Sequence[Reserved]) -> None:
        """Every rank copies; the blocks are found only after the last one has."""
        done = False
        try:
            async with asyncio.TaskGroup() as group:
                for rank in self._domain.ready:
                    command = messages.SaveHost(
                        transfer_id=0,
                        block_ids=[block_id for _, block_id, _ in reserved],
                        slots=[block.slot for block, _, _ in reserved],
                        snapshot_ids=[snapshot_id for _, _, snapshot_id in reserved],
                        snapshot_slots=[block.snapshot_slot for block, _, _ in reserved],
                        deadline_s=SAVE_TIMEOUT_S,
                    )
                    group.create_task(self._worker.transfers.save_host(self._domain, rank.rank, command))
            done = True
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for block, _, _ in reserved:
                (self.slots.filled if done else self.slots.failed)(block)
        self._worker.counts.l2_blocks("saved", len(reserved))


def _load_command(
    blocks: Sequence[L2Block], block_ids: Sequence[int], snapshot_ids: Sequence[int], deadline_s: float
) -> messages.LoadHost:
    """Blocks go with their snapshots where both sides have a place for one."""
    both = [
        (block.snapshot_slot, snapshot_id) if block.snapshot_slot >= 0 and snapshot_id >= 0 else (-1, -1)
        for block, snapshot_id in zip(blocks, snapshot_ids, strict=True)
    ]
    return messages.LoadHost(
        transfer_id=0,
        slots=[block.slot for block in blocks],
        block_ids=list(block_ids),
        snapshot_slots=[slot for slot, _ in both],
        snapshot_ids=[snapshot_id for _, snapshot_id in both],
        deadline_s=deadline_s,
    )
