"""What other routers have placed, so that several of them do not send everybody to the same target.

A replica's reservations stand among this router's own, marked with their origin, and count as load alike. A batch is
applied only if it is the next one of the replica's present incarnation; after a gap its whole list is fetched. When a
replica is gone its reservations stay for as long as one stands without a report: their gateways come here now.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidemill.mesh.v1.router_pb2 import (
    GetReservationsResponse,
    ReservationBatch,
    ReservationChange,
    SharedReservation,
)
from tidemill_kvcache.hashing import pack
from tidemill_router.replica_log import ReplicaLog
from tidemill_router.reservations import Reservations

RETRY_S = 0.5
MAX_BUFFERED = 1024


@dataclass(slots=True)
class Replica:
    """One other router."""

    incarnation: str
    live: bool = False
    sequence: int = 0
    """Of the last batch applied."""
    fetch_at_s: float = 0.0
    fetching: bool = False
    buffer: deque[ReservationBatch] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED))


class Replicas:
    """Pure: the caller fetches the lists that are `due`."""

    def __init__(self, reservations: Reservations, log: ReplicaLog, clock: Callable[[], float]) -> None:
        self.counters: Counter[str] = Counter()
        self.on_due: Callable[[], None] = lambda: None
        """Called when a list should be fetched at once."""
        self._reservations = reservations
        self._log = log
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        log.alone = lambda: not self._replicas

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def num_live(self) -> int:
        """Replicas whose list is known and followed."""
        return sum(replica.live for replica in self._replicas.values())

    def register(self, instance: str, incarnation: str) -> None:
        """The membership names another router."""
        known = self._replicas.get(instance)
        if known is None or known.incarnation != incarnation:
            self.forget(instance)
            self._replicas[instance] = Replica(incarnation, fetch_at_s=self._clock())
            self.on_due()

    def forget(self, instance: str) -> None:
        """A router is gone: its gateways report here from now on, or their reservations end at their deadline."""
        if self._replicas.pop(instance, None) is not None:
            self._reservations.adopt(instance)

    def receive(self, batch: ReservationBatch) -> None:
        """A batch came from the bus."""
        replica = self._replicas.get(batch.router.instance)
        if replica is None or replica.incarnation != batch.router.incarnation:
            self.counters["unknown"] += 1
            return
        self._reservations.heard_from(batch.router.instance)
        expected = replica.sequence if batch.heartbeat else replica.sequence + 1
        if not replica.live:
            if not batch.heartbeat:
                replica.buffer.append(batch)
        elif batch.sequence == expected:
            self._apply(replica, batch)
        elif batch.sequence > expected:
            self.counters["gaps"] += 1
            replica.live, replica.fetch_at_s = False, self._clock()
            if not batch.heartbeat:
                replica.buffer.append(batch)
            self.on_due()
        else:
            self.counters["duplicates"] += 1

    def due(self) -> list[str]:
        """Routers whose list should be fetched now."""
        now = self._clock()
        return [i for i, r in self._replicas.items() if not r.live and not r.fetching and r.fetch_at_s <= now]

    def begin(self, instance: str) -> None:
        """A fetch is about to be sent."""
        self._replicas[instance].fetching = True

    def fail(self, instance: str) -> None:
        """The list could not be had; it is due again after a pause."""
        replica = self._replicas.get(instance)
        if replica is not None:
            replica.fetching, replica.fetch_at_s = False, self._clock() + RETRY_S
            self.counters["fetch_failures"] += 1

    def complete(self, answer: GetReservationsResponse) -> None:
        """A router's list takes the place of what was known of it."""
        instance = answer.router.instance
        replica = self._replicas.get(instance)
        if replica is None or not replica.fetching:
            return
        replica.fetching = False
        if replica.incarnation != answer.router.incarnation:
            replica.fetch_at_s = self._clock() + RETRY_S
            return
        with self._told():
            self._replace(instance, answer)
        replica.live, replica.sequence = True, answer.sequence
        self.counters["resyncs"] += 1
        waiting = sorted(replica.buffer, key=lambda batch: batch.sequence)
        replica.buffer.clear()
        for batch in waiting:
            self.receive(batch)

    def _apply(self, replica: Replica, batch: ReservationBatch) -> None:
        replica.sequence = batch.sequence
        for change in batch.changes:
            self._change(batch.router.instance, change)
        self.counters["batches"] += 1

    @contextmanager
    def _told(self, reservation_id: str = "") -> Iterator[None]:
        """What a replica has told is not told again, except what it told of a reservation made here.

        It may have ended one before it learnt that it was made; this router's own word comes after that.
        """
        found = self._reservations.get(reservation_id)
        self._log.muted = found is None or found.origin != ""
        try:
            yield
        finally:
            self._log.muted = False

    def _replace(self, instance: str, answer: GetReservationsResponse) -> None:
        kept = {made.reservation_id for made in answer.reservations}
        for reservation in self._reservations.of_origin(instance):
            if reservation.id not in kept:
                self._reservations.end(reservation.id, "replica")
        for made in answer.reservations:
            self._made(instance, made)

    def _change(self, instance: str, change: ReservationChange) -> None:
        kind = change.WhichOneof("change")
        if kind == "made":
            with self._told():
                self._made(instance, change.made)
        elif kind == "prefilled":
            with self._told(change.prefilled):
                self._reservations.prefilled(change.prefilled)
        elif kind == "ended":
            with self._told(change.ended):
                self._reservations.end(change.ended, "replica")

    def _made(self, instance: str, made: SharedReservation) -> None:
        self._reservations.reserve(
            made.kind,
            (made.gateway.instance, made.gateway.incarnation),
            made.domain,
            prefill_tokens=made.prefill_tokens,
            blocks=made.blocks,
            hashes=pack(made.block_hashes),
            request=(made.request_id, made.choice),
            predicted_s=made.predicted_s,
            reservation_id=made.reservation_id,
            prefill_id=made.prefill_id,
            origin=instance,
            age_s=made.age_s,
        )
