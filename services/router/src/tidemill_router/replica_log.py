"""What this router tells its replicas: its reservations as they come and go, numbered."""

from collections.abc import Callable, Iterable

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.router_pb2 import (
    GetReservationsResponse,
    ReservationBatch,
    ReservationChange,
    SharedReservation,
)
from tidemill_kvcache.hashing import HASH_BYTES, pack
from tidemill_router.reservations import Reservation

HEARTBEAT_S = 1.0
MAX_SHARED_HASHES = 512
"""Leading blocks of a prompt that replicas are told of; enough to see what requests share."""
MAX_CHANGES = 64
"""Of one batch, so that it fits into a NATS message."""


class ReplicaLog:
    """An observer of reservations. What comes from a replica itself is not told again: see `muted`."""

    def __init__(self, me: Callable[[], InstanceRef], clock: Callable[[], float]) -> None:
        self.sequence = 0
        self.muted = False
        """While changes are applied that a replica has told."""
        self.alone: Callable[[], bool] = lambda: False
        """Whether no other router is known: then changes are numbered only, and one that joins asks for the list."""
        self.on_change: Callable[[], None] = lambda: None
        self._me = me
        self._clock = clock
        self._sent_at = clock()
        self._changes: list[ReservationChange] = []

    def made(self, reservation: Reservation) -> None:
        """A claim was taken."""
        if self._is_told():
            self._add(ReservationChange(made=shared(reservation, self._clock())))

    def prefilled(self, reservation_id: str) -> None:
        """A claim's prompt is computed."""
        if self._is_told():
            self._add(ReservationChange(prefilled=reservation_id))

    def ended(self, reservation_id: str) -> None:
        """A claim ended."""
        if self._is_told():
            self._add(ReservationChange(ended=reservation_id))

    def batches(self) -> list[ReservationBatch]:
        """What to send now: the changes so far, or after a quiet second the sequence once more."""
        now, made = self._clock(), []
        while self._changes:
            changes, self._changes = self._changes[:MAX_CHANGES], self._changes[MAX_CHANGES:]
            self.sequence += 1
            made.append(ReservationBatch(router=self._me(), sequence=self.sequence, changes=changes))
        if not made and now - self._sent_at >= HEARTBEAT_S:
            made.append(ReservationBatch(router=self._me(), sequence=self.sequence, heartbeat=True))
        if made:
            self._sent_at = now
        return made

    def snapshot(self, own: Iterable[Reservation]) -> GetReservationsResponse:
        """The router's own reservations; what is not sent yet is in them and will be repeated."""
        now = self._clock()
        return GetReservationsResponse(
            router=self._me(), sequence=self.sequence, reservations=[shared(made, now) for made in own]
        )

    def _is_told(self) -> bool:
        if self.muted:
            return False
        if self.alone():
            # A router that follows already sees by the next heartbeat that it has missed something.
            self.sequence += 1
            return False
        return True

    def _add(self, change: ReservationChange) -> None:
        self._changes.append(change)
        self.on_change()


def shared(reservation: Reservation, now_s: float) -> SharedReservation:
    """A reservation as replicas see it."""
    return SharedReservation(
        reservation_id=reservation.id,
        kind=reservation.kind,
        gateway=InstanceRef(instance=reservation.owner[0], incarnation=reservation.owner[1]),
        domain=reservation.domain,
        prefill_tokens=reservation.prefill_tokens,
        blocks=reservation.blocks,
        block_hashes=pack(reservation.hashes)[: MAX_SHARED_HASHES * HASH_BYTES],
        request_id=reservation.request[0],
        choice=reservation.request[1],
        predicted_s=reservation.predicted_s,
        age_s=now_s - reservation.made_at_s,
        prefill_id=reservation.prefill_id,
    )
