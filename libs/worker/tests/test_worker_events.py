"""KV events in order, with snapshots that agree with their sequence."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.mesh.v1 import common_pb2, events_pb2, membership_pb2
from tidemill_engine import messages
from tidemill_kvcache.events import with_snapshot
from tidemill_kvcache.runs import DroppedSnapshots, StoredRun
from tidemill_mesh.channels import Channels
from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.domain import Domain
from tidemill_worker.kv_events import KvEvents
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.tickets import TicketBook
from tidemill_worker.transfers import RankTransfers
from tidemill_worker.worker import Worker

HASHES = [bytes([number]) * 16 for number in range(6)]


class Clock:
    """A clock that a test moves."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Events of one domain, and what was published."""

    def __init__(self) -> None:
        settings, counts = WorkerSettings(), WorkerCounts(Metrics("prefill", "p-1"))
        self.clock = Clock()
        self.published: list[tuple[str, events_pb2.KvEventBatch]] = []
        self.worker = Worker(
            settings=settings,
            role=membership_pb2.ROLE_PREFILL,
            instance="p-1",
            channels=Channels(settings),
            counts=counts,
            tickets=TicketBook(self.clock),
            transfers=RankTransfers(1.0, counts.transferred),
            clock=self.clock,
            incarnation="i1",
        )
        self.domain = cast("Domain", SimpleNamespace(index=0, epoch="e1", up=True))
        self.worker.domains.append(self.domain)
        self.events = KvEvents(self.worker, self._publish)
        self.events.domain_up(self.domain)

    def _publish(self, subject: str, payload: bytes) -> None:
        self.published.append((subject, events_pb2.KvEventBatch.FromString(payload)))

    def stored(self, parent: bytes, *hashes: bytes, snapshots: tuple[bytes, ...] = ()) -> None:
        """A step that stored a run."""
        has_snapshot = [block_hash in snapshots for block_hash in hashes]
        self.events.stored(self.domain, messages.BlocksStored(parent, list(hashes), has_snapshot))
        self.events.step_done(self.domain)

    def blocks(self) -> dict[bytes, bytes]:
        """The snapshot's blocks with their parents."""
        found: dict[bytes, bytes] = {}
        for run in self.events.snapshot(self.domain)[1]:
            parent = run.parent_block_hash
            for start in range(0, len(run.block_hashes), 16):
                block = run.block_hashes[start : start + 16]
                assert not parent or parent in found, "parents come before children"
                found[block], parent = parent, block
        return found


@pytest.fixture
async def bench() -> Any:
    """A fresh bench."""
    return Bench()


async def test_each_step_is_one_batch_and_the_snapshot_follows(bench: Bench) -> None:
    bench.stored(b"", *HASHES[:3])
    bench.stored(HASHES[2], HASHES[3])
    assert [batch.sequence for _, batch in bench.published] == [1, 2]
    assert {subject for subject, _ in bench.published} == {"tidemill.default.kv.p-1"}
    assert bench.events.snapshot(bench.domain)[0] == 2
    assert bench.blocks() == {HASHES[0]: b"", HASHES[1]: HASHES[0], HASHES[2]: HASHES[1], HASHES[3]: HASHES[2]}
    bench.events.removed(bench.domain, messages.BlocksRemoved([HASHES[3]]))
    bench.events.step_done(bench.domain)
    assert HASHES[3] not in bench.blocks()
    assert bench.published[-1][1].events[0].removed.tier == common_pb2.TIER_L1


async def test_an_idle_domain_repeats_its_sequence(bench: Bench) -> None:
    bench.stored(b"", HASHES[0])
    bench.events.heartbeat()
    assert len(bench.published) == 1
    bench.clock.now += 1.0
    bench.events.heartbeat()
    _, beat = bench.published[-1]
    assert (beat.heartbeat, beat.sequence, len(beat.events)) == (True, 1, 0)


async def test_a_cleared_cache_is_told_and_leaves_an_empty_snapshot(bench: Bench) -> None:
    bench.stored(b"", *HASHES)
    bench.events.cleared(bench.domain)
    bench.events.step_done(bench.domain)
    assert bench.published[-1][1].events[0].HasField("cleared")
    assert bench.blocks() == {}
    assert bench.events.num_blocks(bench.domain) == 0


async def test_a_new_incarnation_goes_on_with_its_sequence_under_the_new_name(bench: Bench) -> None:
    bench.stored(b"", HASHES[0])
    bench.worker.incarnation = "i2"
    bench.events.new_incarnation()
    bench.stored(HASHES[0], HASHES[1])
    _, batch = bench.published[-1]
    assert (batch.domain.incarnation, batch.domain.epoch, batch.sequence) == ("i2", "e1", 2)


async def test_lost_batches_are_sent_again_only_to_who_knows_the_present_identity(bench: Bench) -> None:
    for number in range(4):
        bench.stored(HASHES[number - 1] if number else b"", HASHES[number])
    sent = [batch for _, batch in bench.published]
    known = bench.worker.domain_ref(bench.domain)
    assert bench.events.replay(bench.domain, known, 2) == sent[2:]
    assert bench.events.replay(bench.domain, known, 4) == []
    assert bench.events.replay(bench.domain, known, 5) is None, "a sequence that was never sent"
    assert bench.events.replay(bench.domain, common_pb2.DomainRef(), 0) is None, "who knows nothing gets a snapshot"
    bench.worker.incarnation = "i2"
    bench.events.new_incarnation()
    assert bench.events.replay(bench.domain, known, 2) is None
    assert bench.events.replay(bench.domain, bench.worker.domain_ref(bench.domain), 2) is None


async def test_a_new_epoch_starts_from_nothing(bench: Bench) -> None:
    bench.stored(b"", *HASHES)
    bench.events.domain_down(bench.domain)
    bench.domain.epoch = "e2"
    bench.events.domain_up(bench.domain)
    sequence, runs = bench.events.snapshot(bench.domain)
    assert (sequence, list(runs)) == (0, [])
    bench.stored(b"", HASHES[0])
    assert bench.published[-1][1].sequence == 1


async def test_snapshots_are_told_of_with_their_blocks_and_when_they_leave_alone(bench: Bench) -> None:
    def known() -> set[tuple[int, bytes]]:
        return {
            (run.tier, with_snapshot(run)[at : at + 16])
            for run in bench.events.snapshot(bench.domain)[1]
            for at in range(0, len(with_snapshot(run)), 16)
        }

    bench.stored(b"", *HASHES[:4], snapshots=(HASHES[1], HASHES[3]))
    bench.events.moved(bench.domain, [StoredRun(HASHES[0], [HASHES[1]], [True])])
    l1, l2 = common_pb2.TIER_L1, common_pb2.TIER_L2
    assert known() == {(l1, HASHES[1]), (l1, HASHES[3]), (l2, HASHES[1])}
    bench.events.snapshots_dropped(bench.domain, messages.SnapshotsDropped([HASHES[1]]))
    bench.events.step_done(bench.domain)
    assert known() == {(l1, HASHES[3]), (l2, HASHES[1])}
    bench.events.moved(bench.domain, [DroppedSnapshots([HASHES[1]])])
    bench.events.removed(bench.domain, messages.BlocksRemoved([HASHES[3]]))
    bench.events.step_done(bench.domain)
    assert known() == set()
    assert set(bench.blocks()) == set(HASHES[:3])
    kinds = [event.WhichOneof("event") for _, batch in bench.published for event in batch.events]
    assert kinds == ["stored", "stored", "snapshots_removed", "snapshots_removed", "removed"]
