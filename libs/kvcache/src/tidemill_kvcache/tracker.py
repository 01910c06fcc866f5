"""Keeps the index equal to the workers' own block lists over a bus that drops, repeats, delays and reorders.

A batch is applied only if it is the next one of the identity (incarnation, epoch) that the domain now has. A gap or an
unknown identity asks the worker once, which answers with the batches that are lacking while it still has them, else
with a snapshot; until that is in place the old content keeps its score and later batches wait. The answer says which
identity is the present one; what came earlier under another one is late and refused from then on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEventBatch
from tidemill_kvcache.domain_blocks import DomainBlocks
from tidemill_kvcache.domain_track import DomainTrack, Holder, TrackState, holder_of, identity_of
from tidemill_kvcache.events import HEARTBEAT_S
from tidemill_kvcache.index import BlockIndex

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 5.0


class EventTracker:
    """Applies events to an index. Pure: the caller fetches the snapshots or replays that are `due`."""

    def __init__(self, index: BlockIndex, clock: Callable[[], float]) -> None:
        self.counters: Counter[str] = Counter()
        self._index = index
        self._clock = clock
        self._tracks: dict[Holder, DomainTrack] = {}
        self._blocks: dict[Holder, DomainBlocks] = {}

    def register(self, domain: DomainRef, *, has_snapshot: bool = True) -> None:
        """The membership says that this is the domain's present identity."""
        holder, identity = holder_of(domain), identity_of(domain)
        track = self._tracks.get(holder)
        if track is None:
            track = self._tracks[holder] = DomainTrack(holder, identity, has_snapshot)
            self._blocks[holder] = DomainBlocks(self._index, holder)
            self._start(track)
        elif track.identity != identity:
            track.retire(track.identity)
            track.retired.pop(identity, None)
            track.unsettled.discard(identity)
            track.identity = identity
            self._blocks[holder].drop()
            self._start(track)

    def forget(self, instance: str) -> None:
        """The instance is gone, and its blocks with it."""
        for holder in [h for h in self._tracks if h[0] == instance]:
            del self._tracks[holder]
            blocks = self._blocks.pop(holder)
            blocks.drop()
            blocks.discard_staged()

    def get(self, holder: Holder) -> DomainTrack | None:
        """State of a domain, to be read only."""
        return self._tracks.get(holder)

    def receive(self, batch: KvEventBatch) -> None:
        """A batch came from the bus."""
        track = self._tracks.get(holder_of(batch.domain))
        if track is None:
            self.counters["unknown_domain"] += 1
        elif identity_of(batch.domain) in track.retired:
            self.counters["stale"] += 1
        elif identity_of(batch.domain) != track.identity:
            self.counters["unknown_identity"] += 1
            track.unsettled.add(identity_of(batch.domain))
            self._wait(track, batch)
        elif track.state is not TrackState.LIVE:
            self._wait(track, batch)
        else:
            self._advance(track, batch)

    def due(self) -> list[Holder]:
        """Domains whose snapshot or replay should be fetched now."""
        now = self._clock()
        return [h for h, t in self._tracks.items() if t.state is TrackState.COLD and t.retry_at_s <= now]

    def known(self, holder: Holder) -> tuple[DomainRef, int] | None:
        """(identity, sequence) that a replay can continue; None: only a snapshot helps."""
        track = self._tracks[holder]
        if not track.can_resume:
            return None
        (instance, domain), (incarnation, epoch) = holder, track.identity
        return DomainRef(instance=instance, incarnation=incarnation, domain=domain, epoch=epoch), track.sequence

    def begin(self, holder: Holder) -> int:
        """Names a fetch, whose request is not sent before this call."""
        track = self._tracks[holder]
        track.state = TrackState.FETCHING
        track.fetch_id += 1
        track.settled_by_fetch = set(track.unsettled)
        self._blocks[holder].discard_staged()
        return track.fetch_id

    def add_snapshot_blocks(self, holder: Holder, fetch_id: int, blocks: Iterable[BlockStored]) -> None:
        """A part of the snapshot; it takes effect with `complete`."""
        if self._fetching(holder, fetch_id):
            for run in blocks:
                self._blocks[holder].stage(run)

    def complete(self, fetch_id: int, domain: DomainRef, sequence: int) -> None:
        """The snapshot is whole: what was staged is the domain's list as of `sequence`."""
        holder, identity = holder_of(domain), identity_of(domain)
        track = self._fetching(holder, fetch_id)
        if track is None:
            return
        if identity in track.retired:
            self.counters["stale_snapshots"] += 1
            self.fail(holder, fetch_id)
            return
        for late in (track.settled_by_fetch | {track.identity}) - {identity}:
            track.retire(late)
        track.unsettled.discard(identity)
        self._blocks[holder].publish()
        track.identity, track.sequence = identity, sequence
        self.counters["resyncs"] += 1
        self._go_live(track)

    def replay(self, fetch_id: int, domain: DomainRef, batches: Iterable[KvEventBatch]) -> None:
        """The worker's answer is what the domain lacks; one with a hole, or of another identity, is a failure."""
        holder = holder_of(domain)
        track = self._fetching(holder, fetch_id)
        if track is None:
            return
        listed = [batch for batch in batches if batch.sequence > track.sequence]
        first = track.sequence + 1
        whole = [batch.sequence for batch in listed] == list(range(first, first + len(listed)))
        alike = all(batch.domain == domain for batch in listed)
        if not (track.can_resume and whole and alike and identity_of(domain) == track.identity):
            track.can_resume = False
            self.fail(holder, fetch_id)
            return
        for late in track.settled_by_fetch - {track.identity}:
            track.retire(late)
        # Should one of them be unreadable, only a snapshot helps.
        track.can_resume = False
        for batch in listed:
            self._apply(track, batch)
        self.counters["replays"] += 1
        self._go_live(track)

    def fail(self, holder: Holder, fetch_id: int) -> None:
        """The snapshot could not be had; it is due again after a pause."""
        track = self._fetching(holder, fetch_id)
        if track is not None:
            self._blocks[holder].discard_staged()
            self.counters["snapshot_failures"] += 1
            self._back_off(track)

    def _fetching(self, holder: Holder, fetch_id: int) -> DomainTrack | None:
        track = self._tracks.get(holder)
        under_way = track is not None and track.state is TrackState.FETCHING and track.fetch_id == fetch_id
        return track if under_way else None

    def _start(self, track: DomainTrack) -> None:
        """A cache that starts anew: empty and live where no snapshot can be had, else cold."""
        track.sequence, track.failures, track.retry_at_s = 0, 0, self._clock()
        track.can_resume = False
        self._blocks[track.holder].discard_staged()
        if track.has_snapshot:
            track.state = TrackState.COLD
            return
        track.state = TrackState.LIVE
        self._drain(track)

    def _wait(self, track: DomainTrack, batch: KvEventBatch) -> None:
        """Keeps a batch for after the snapshot, and asks for one if none is on its way."""
        if not batch.heartbeat:
            if len(track.buffer) == track.buffer.maxlen:
                self.counters["buffer_overflows"] += 1
            track.buffer.append(batch)
        if track.state is TrackState.LIVE and track.has_snapshot:
            track.state = TrackState.COLD
            track.retry_at_s = self._clock()

    def _advance(self, track: DomainTrack, batch: KvEventBatch) -> None:
        """A batch of the present identity in a live domain."""
        expected = track.sequence if batch.heartbeat else track.sequence + 1
        silent_s = self._clock() - track.confirmed_at_s
        if batch.sequence == expected or (not track.has_snapshot and track.sequence == 0):
            self._apply(track, batch)
        elif batch.sequence > expected:
            self.counters["gaps"] += 1
            track.gaps += 1
            self._recover(track, batch)
        elif batch.heartbeat and silent_s > 3 * HEARTBEAT_S:
            self.counters["older_sequences"] += 1
            self._recover(track, batch)
        else:
            self.counters["duplicates"] += 1

    def _recover(self, track: DomainTrack, batch: KvEventBatch) -> None:
        if track.has_snapshot:
            self._wait(track, batch)
        else:
            self._blocks[track.holder].drop()
            self._apply(track, batch)

    def _apply(self, track: DomainTrack, batch: KvEventBatch) -> None:
        blocks = self._blocks[track.holder]
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                blocks.stored(event.stored)
            elif kind == "removed":
                blocks.removed(event.removed)
            elif kind == "snapshots_removed":
                blocks.snapshots_removed(event.snapshots_removed)
            elif kind == "cleared":
                blocks.drop()
        track.sequence, track.confirmed_at_s = batch.sequence, self._clock()
        self.counters["batches"] += 1

    def _go_live(self, track: DomainTrack) -> None:
        """After a snapshot or replay: batches that it does not hold follow, the rest was late."""
        track.state, track.can_resume = TrackState.LIVE, True
        track.confirmed_at_s = self._clock()
        track.resyncs += 1
        waiting = len(track.buffer)
        self._drain(track)
        if track.state is TrackState.LIVE:
            track.failures = 0
        elif waiting:
            self._back_off(track)

    def _drain(self, track: DomainTrack) -> None:
        """Receives the buffered batches once more, in order of their sequence."""
        waiting: Sequence[KvEventBatch] = sorted(track.buffer, key=lambda batch: batch.sequence)
        track.buffer.clear()
        for batch in waiting:
            self.receive(batch)

    def _back_off(self, track: DomainTrack) -> None:
        pause = min(FIRST_RETRY_S * 2**track.failures, LAST_RETRY_S)
        track.failures += 1
        track.state = TrackState.COLD
        track.retry_at_s = self._clock() + pause
