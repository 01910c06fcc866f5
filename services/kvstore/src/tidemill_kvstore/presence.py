"""Tells the mesh which blocks lie here: KV events of tier L3, and the snapshot that they continue.

The store speaks as one domain, 0, whose epoch is its incarnation.
"""

from collections.abc import Callable, Iterable, Iterator

from tidemill.mesh.v1 import common_pb2, events_pb2, worker_pb2
from tidemill_kvcache.events import EventSequencer, removed_event, snapshots_removed_event, stored_event
from tidemill_kvcache.mirror import BlockMirror
from tidemill_kvcache.runs import CacheEvent, DroppedSnapshots, RemovedRun, StoredRun
from tidemill_kvcache.snapshot_parts import MAX_HASHES, cut, snapshot_parts
from tidemill_mesh.load import kv_subject

TIER_L3 = common_pb2.TIER_L3


class Presence:
    """Mirror and sequence change in one step, so that a snapshot agrees with its sequence."""

    def __init__(
        self,
        mesh: str,
        instance: str,
        incarnation: str,
        publish: Callable[[str, bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._instance = instance
        self._subject = kv_subject(mesh, instance)
        self._publish = publish
        self._clock = clock
        self._mirror = BlockMirror()
        self._sequencer = self._sequence(incarnation)

    def begin(self, events: Iterable[CacheEvent]) -> None:
        """Takes in what was on disk at the start; the mesh learns it by snapshot."""
        for event in _kv_events(events):
            self._mirror.apply(event)

    def new_incarnation(self, incarnation: str) -> None:
        """Goes on under a new name; routers fetch a snapshot."""
        self._sequencer = self._sequence(incarnation)

    def tell(self, events: Iterable[CacheEvent]) -> None:
        """Publishes what came and went, in order."""
        for event in _kv_events(events):
            self._mirror.apply(event)
            self._send(self._sequencer.batch([event]))

    def heartbeat(self) -> None:
        """Repeats the sequence when nothing happened for a second."""
        self._send(self._sequencer.heartbeat())

    def replay(self, known: common_pb2.DomainRef, sequence: int) -> worker_pb2.GetSnapshotResponse | None:
        """The batches after one that a router has; None: it needs a snapshot."""
        batches = self._sequencer.replay(known, sequence)
        if batches is None:
            return None
        return worker_pb2.GetSnapshotResponse(domain=self._sequencer.domain, replay=True, batches=batches, last=True)

    def snapshot(self) -> Iterator[worker_pb2.GetSnapshotResponse]:
        """All blocks as of this call, whatever comes while they are sent, in messages of bounded size."""
        return snapshot_parts(self._sequencer.domain, self._sequencer.sequence, self._mirror.runs())

    def _sequence(self, incarnation: str) -> EventSequencer:
        domain = common_pb2.DomainRef(instance=self._instance, incarnation=incarnation, domain=0, epoch=incarnation)
        return EventSequencer(domain, "", self._clock)

    def _send(self, batch: events_pb2.KvEventBatch | None) -> None:
        if batch is not None:
            self._publish(self._subject, batch.SerializeToString())


def _kv_events(events: Iterable[CacheEvent]) -> Iterator[events_pb2.KvEvent]:
    for event in events:
        if isinstance(event, StoredRun):
            told = stored_event(event.parent, event.hashes, TIER_L3, event.kv_format_id, event.has_snapshot)
            for piece in cut(told.stored):
                yield events_pb2.KvEvent(stored=piece)
        elif isinstance(event, RemovedRun):
            for start in range(0, len(event.hashes), MAX_HASHES):
                yield removed_event(event.hashes[start : start + MAX_HASHES], TIER_L3, event.kv_format_id)
        elif isinstance(event, DroppedSnapshots):
            for start in range(0, len(event.hashes), MAX_HASHES):
                part = event.hashes[start : start + MAX_HASHES]
                yield snapshots_removed_event(part, TIER_L3, event.kv_format_id)
