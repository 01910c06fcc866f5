"""KV events of simulated engines on their way to an index, late and lossy, through the product's own protocol."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemill.mesh.v1.common_pb2 import TIER_L1, DomainRef
from tidemill.mesh.v1.events_pb2 import KvEvent, KvEventBatch
from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_kvcache.domain_track import Holder, holder_of
from tidemill_kvcache.events import (
    HEARTBEAT_S,
    EventSequencer,
    cleared_event,
    removed_event,
    snapshots_removed_event,
    stored_event,
)
from tidemill_kvcache.index import BlockIndex
from tidemill_kvcache.mirror import BlockMirror
from tidemill_kvcache.runs import CacheEvent, DroppedSnapshots, RemovedRun, StoredRun
from tidemill_kvcache.tracker import EventTracker

REVISION = "r"
SNAPSHOT_S = 0.05
"""From the moment that a snapshot is due until it is asked for, beside the delay of its way."""


@dataclass(frozen=True, kw_only=True)
class BusFaults:
    """What befalls events on their way."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of the batches that never arrive."""
    seed: int = 1


class EventSource:
    """One domain's publisher: sequence and mirror, as in a worker's service."""

    def __init__(self, domain: DomainRef, publish: Callable[[KvEventBatch], None], clock: Callable[[], float]) -> None:
        self.domain = domain
        self.sequencer = EventSequencer(domain, REVISION, clock)
        self.mirror = BlockMirror()
        self._publish = publish

    def publish_cache_events(self, events: list[CacheEvent]) -> None:
        """Announces what a cache did in one step."""
        self.publish([_to_wire(event) for event in events])

    def publish(self, events: list[KvEvent]) -> None:
        """Announces events as one batch."""
        for event in events:
            self.mirror.apply(event)
        batch = self.sequencer.batch(events)
        if batch is not None:
            self._publish(batch)

    def beat(self) -> None:
        """Repeats the sequence if nothing was announced for a while."""
        batch = self.sequencer.heartbeat()
        if batch is not None:
            self._publish(batch)


class IndexFeed:
    """Index and tracker of a router, and the way of the events to them."""

    def __init__(self, clock: SimulatedClock, faults: BusFaults, max_bytes: int = 1 << 30) -> None:
        self.index = BlockIndex(max_bytes)
        self.tracker = EventTracker(self.index, clock)
        self._clock = clock
        self._faults = faults
        self._rng = random.Random(faults.seed)
        self._sources: dict[Holder, EventSource] = {}

    def source(self, instance: str, *, has_snapshot: bool = True) -> EventSource:
        """A new domain, known to the tracker at once."""
        domain = DomainRef(instance=instance, incarnation="i", epoch="e")
        self.tracker.register(domain, has_snapshot=has_snapshot)
        source = self._sources[holder_of(domain)] = EventSource(domain, self._send, self._clock)
        self._fetch(holder_of(domain))
        return source

    def heal(self) -> None:
        """Ends the losses and lets each domain repeat its sequence, as idle ones do."""
        self._faults = replace(self._faults, loss=0.0)
        for source in self._sources.values():
            self._clock.at(self._clock.now_s + HEARTBEAT_S, source.beat)

    def _send(self, batch: KvEventBatch) -> None:
        if self._faults.loss and self._rng.random() < self._faults.loss:
            return
        if self._faults.delay_s == 0.0:
            self._receive(batch)
        else:
            self._clock.at(self._clock.now_s + self._faults.delay_s, lambda: self._receive(batch))

    def _receive(self, batch: KvEventBatch) -> None:
        self.tracker.receive(batch)
        holder = holder_of(batch.domain)
        if holder in self.tracker.due():
            self._clock.at(self._clock.now_s + SNAPSHOT_S, lambda: self._fetch(holder))

    def _fetch(self, holder: Holder) -> None:
        if holder not in self.tracker.due():
            return
        fetch_id = self.tracker.begin(holder)
        source = self._sources[holder]
        runs, sequence = source.mirror.runs(), source.sequencer.sequence

        def arrive() -> None:
            self.tracker.add_snapshot_blocks(holder, fetch_id, runs)
            self.tracker.complete(fetch_id, source.domain, sequence)
            if holder in self.tracker.due():
                self._clock.at(self._clock.now_s + SNAPSHOT_S, lambda: self._fetch(holder))

        self._clock.at(self._clock.now_s + self._faults.delay_s, arrive)


def _to_wire(event: CacheEvent) -> KvEvent:
    if isinstance(event, StoredRun):
        return stored_event(event.parent, event.hashes, TIER_L1, has_snapshot=event.has_snapshot)
    if isinstance(event, RemovedRun):
        return removed_event(event.hashes, TIER_L1)
    if isinstance(event, DroppedSnapshots):
        return snapshots_removed_event(event.hashes, TIER_L1)
    return cleared_event()
