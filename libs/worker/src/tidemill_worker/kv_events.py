"""KV events of this instance's domains: published in order, mirrored for snapshots."""

from collections.abc import Callable, Iterator

from tidemill.mesh.v1 import common_pb2, events_pb2
from tidemill_engine import messages
from tidemill_kvcache.events import (
    EventSequencer,
    cleared_event,
    removed_event,
    snapshots_removed_event,
    stored_event,
)
from tidemill_kvcache.mirror import BlockMirror
from tidemill_kvcache.runs import CacheEvent, DroppedSnapshots, RemovedRun, StoredRun
from tidemill_mesh.load import kv_subject
from tidemill_worker.domain import Domain
from tidemill_worker.worker import Worker

TIER_L1, TIER_L2 = common_pb2.TIER_L1, common_pb2.TIER_L2


class KvEvents:
    """A cache observer. Mirror and sequence change in one step, so that a snapshot agrees with its sequence."""

    def __init__(self, worker: Worker, publish: Callable[[str, bytes], None]) -> None:
        self._worker = worker
        self._publish = publish
        self._sequencers: dict[int, EventSequencer] = {}
        self._mirrors: dict[int, BlockMirror] = {}
        self._pending: dict[int, list[events_pb2.KvEvent]] = {}

    def domain_up(self, domain: Domain) -> None:
        """Starts the epoch's sequence."""
        ref = self._worker.domain_ref(domain)
        self._sequencers[domain.index] = EventSequencer(ref, self._worker.model.revision, self._worker.clock)
        self._mirrors[domain.index] = BlockMirror()
        self._pending[domain.index] = []

    def domain_down(self, domain: Domain) -> None:
        """The epoch's blocks are gone; routers learn it from membership."""
        for kept in (self._sequencers, self._mirrors, self._pending):
            kept.pop(domain.index, None)  # type: ignore[attr-defined]

    def new_incarnation(self) -> None:
        """The domains go on under a new name; routers fetch snapshots."""
        for index, sequencer in self._sequencers.items():
            sequencer.domain = self._worker.domain_ref(self._worker.domains[index])

    def stored(self, domain: Domain, event: messages.BlocksStored) -> None:
        """Blocks became reusable."""
        told = stored_event(event.parent_hash, event.block_hashes, TIER_L1, has_snapshot=event.has_snapshot)
        self._pending[domain.index].append(told)

    def removed(self, domain: Domain, event: messages.BlocksRemoved) -> None:
        """Blocks left."""
        self._pending[domain.index].append(removed_event(event.block_hashes, TIER_L1))

    def snapshots_dropped(self, domain: Domain, event: messages.SnapshotsDropped) -> None:
        """Blocks go on without their snapshots."""
        self._pending[domain.index].append(snapshots_removed_event(event.block_hashes, TIER_L1))

    def cleared(self, domain: Domain) -> None:
        """All blocks left."""
        self._pending[domain.index].append(cleared_event())

    def moved(self, domain: Domain, moves: list[CacheEvent]) -> None:
        """Blocks came to L2 or left it: told at once, after what the step has brought."""
        if domain.index not in self._pending:
            return
        for move in moves:
            if isinstance(move, StoredRun):
                told = stored_event(move.parent, move.hashes, TIER_L2, has_snapshot=move.has_snapshot)
                self._pending[domain.index].append(told)
            elif isinstance(move, RemovedRun):
                self._pending[domain.index].append(removed_event(move.hashes, TIER_L2))
            elif isinstance(move, DroppedSnapshots):
                self._pending[domain.index].append(snapshots_removed_event(move.hashes, TIER_L2))
        self.step_done(domain)

    def step_done(self, domain: Domain) -> None:
        """Publishes the step's events as one batch."""
        events, self._pending[domain.index] = self._pending[domain.index], []
        for event in events:
            self._mirrors[domain.index].apply(event)
        self._send(self._sequencers[domain.index].batch(events))

    def heartbeat(self) -> None:
        """Repeats the sequence of domains that have been idle for a second."""
        for sequencer in self._sequencers.values():
            self._send(sequencer.heartbeat())

    def snapshot(self, domain: Domain) -> tuple[int, Iterator[events_pb2.BlockStored]]:
        """The domain's sequence and its blocks as of it, whatever comes while they are read; parents first."""
        return self._sequencers[domain.index].sequence, self._mirrors[domain.index].runs()

    def replay(
        self, domain: Domain, known: common_pb2.DomainRef, sequence: int
    ) -> list[events_pb2.KvEventBatch] | None:
        """The batches after one that a router has; None: it needs a snapshot."""
        return self._sequencers[domain.index].replay(known, sequence)

    def num_blocks(self, domain: Domain) -> int:
        """Cached blocks of a domain."""
        mirror = self._mirrors.get(domain.index)
        return len(mirror) if mirror is not None else 0

    def _send(self, batch: events_pb2.KvEventBatch | None) -> None:
        if batch is not None:
            subject = kv_subject(self._worker.settings.mesh, self._worker.instance)
            self._publish(subject, batch.SerializeToString())
            if not batch.heartbeat:
                self._worker.counts.event_batch()
