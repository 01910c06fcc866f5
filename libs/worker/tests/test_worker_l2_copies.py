"""Copies from L1 down to L2: what every rank has copied is found, what one could not copy is not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.runs import CacheEvent, RemovedRun
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_worker import l2
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.l2 import DomainL2
from tidemill_worker.pins import DomainPins
from tidemill_worker.residents import StoredBlock

BLOCKS = 10
HASHES = [bytes([n]) * 16 for n in range(BLOCKS)]
STORED = [StoredBlock(HASHES[n - 1] if n else b"", HASHES[n], False, "t", n + 1) for n in range(BLOCKS)]


class Rig:
    """An L2 of two ranks, whose second fails at the copies that `fails` names by their number."""

    def __init__(self, fails: set[int]) -> None:
        self.fails, self.copies = fails, 0
        self.held: set[int] = set()
        self.damaged = -1
        """Slot of the second rank."""
        self.told: list[CacheEvent] = []
        self.counts = WorkerCounts(Metrics("prefill", "p"))
        ready = [SimpleNamespace(rank=rank, num_host_blocks=BLOCKS, num_host_snapshots=0) for rank in (0, 1)]
        domain: Any = SimpleNamespace(index=0, epoch="e1", ready=ready, send=self.send)
        transfers = SimpleNamespace(save_host=self.save_host, load_host=self.load_host)
        worker: Any = SimpleNamespace(counts=self.counts, transfers=transfers)
        self.pins = DomainPins(domain)
        self.l2 = DomainL2(worker, domain, self.pins, lambda _, events: self.told.extend(events))

    def send(self, command: Any) -> None:
        """The leader's part."""
        if isinstance(command, messages.UnpinBlocks):
            self.held.discard(command.pin_id)
            return
        self.held.add(command.pin_id)
        ids = list(range(len(command.block_hashes)))
        self.pins.pinned(messages.BlocksPinned(command.pin_id, ids, [-1] * len(ids)))

    async def save_host(self, _: Any, rank: int, command: messages.SaveHost) -> None:
        """A rank's copy."""
        self.copies += rank == 1
        if rank == 1 and self.copies in self.fails:
            raise MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "cannot copy")

    async def load_host(self, _: Any, rank: int, command: messages.LoadHost) -> messages.TransferDone:
        """A rank's copy back, in which those before a damaged slot are good."""
        good = command.slots.index(self.damaged) if rank == 1 and self.damaged in command.slots else len(command.slots)
        return messages.TransferDone(0, 1, 1.0, good_blocks=good)

    async def copied(self) -> None:
        """Until nothing is left to copy."""
        while self.l2.num_holds:
            await asyncio.sleep(0)


async def test_a_copy_that_one_rank_fails_is_never_found_nor_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second one fails; what failed may be copied later, and nothing stays held."""
    monkeypatch.setattr(l2, "SAVE_BATCH_BLOCKS", 1)
    rig = Rig(fails={2, 4, 6, 8, 10})
    rig.l2.offer(STORED)
    await rig.copied()
    found = [rig.l2.slots.get(block_hash) is not None for block_hash in HASHES]
    assert found == [True, False] * 5
    announced = {block_hash for event in rig.told for block_hash in getattr(event, "hashes", ())}
    assert announced == {block_hash for block_hash, there in zip(HASHES, found, strict=True) if there}
    assert not rig.held
    assert rig.l2.slots.pinned_blocks == 0
    assert len(rig.l2.leading(HASHES)) == 1, "a prompt uses what lies before the first hole"
    rig.fails.clear()
    rig.l2.offer(STORED)
    await rig.copied()
    assert len(rig.l2.leading(HASHES)) == BLOCKS
    await rig.l2.close()


async def test_a_block_that_one_rank_finds_damaged_is_dropped_counted_and_told() -> None:
    rig = Rig(fails=set())
    rig.l2.offer(STORED)
    await rig.copied()
    rig.told.clear()
    blocks = rig.l2.leading(HASHES)
    rig.damaged = blocks[3].slot
    assert await rig.l2.load(blocks, list(range(BLOCKS)), [-1] * BLOCKS, 30.0) == 3
    assert rig.told == [RemovedRun([HASHES[3]])]
    assert len(rig.l2.leading(HASHES)) == 3
    assert rig.counts.totals["l2_blocks_damaged"] == 1
    assert rig.l2.slots.pinned_blocks == 0
    # Computed again, it is copied again.
    rig.damaged = -1
    rig.l2.offer(STORED)
    await rig.copied()
    assert len(rig.l2.leading(HASHES)) == BLOCKS
    await rig.l2.close()
