"""Reservations at the router: renewed while they live, reported at their end, restored to a router that forgot."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.router_pb2 import LiveReservation, Report

MAX_QUEUED_REPORTS = 10_000
_ENDS = frozenset({Report.KIND_DONE, Report.KIND_FAILED, Report.KIND_CANCELLED})


@dataclass(slots=True, eq=False)
class Reservation:
    """A claim on an instance that the router keeps for a stage of a request."""

    reservation_id: str
    request_id: str
    domain: DomainRef
    decode: bool
    tokens: int
    lease_s: float
    """Seconds that it stands without a report."""
    renew_at: float


@dataclass
class Reservations:
    """All live reservations and the reports that wait to be sent."""

    clock: Callable[[], float]
    live: dict[str, Reservation] = field(default_factory=dict)
    queue: deque[Report] = field(default_factory=deque)
    dropped: int = 0
    on_work: Callable[[], object] = lambda: None
    """Called when there is something to renew or to report."""

    def hold(self, request_id: str, reservation_id: str, domain: DomainRef, lease_s: float, *, decode: bool,
             tokens: int) -> Reservation | None:  # fmt: skip
        """Takes a placement's reservation into care; None for a placement without one."""
        if not reservation_id:
            return None
        renew_at = self.clock() + lease_s / 2
        held = Reservation(reservation_id, request_id, domain, decode, tokens, lease_s, renew_at)
        self.live[reservation_id] = held
        self.on_work()
        return held

    def report(self, held: Reservation | None, kind: "Report.Kind.ValueType", *, instance_lost: bool = False,
               measured_s: float = 0.0, output_tokens: int = 0) -> None:  # fmt: skip
        """Queues a report; one that ends the reservation is the last for it, whatever is reported later."""
        if held is None or held.reservation_id not in self.live:
            return
        if kind in _ENDS:
            del self.live[held.reservation_id]
        self._enqueue(
            Report(
                reservation_id=held.reservation_id,
                kind=kind,
                instance_lost=instance_lost,
                measured_s=measured_s,
                output_tokens=output_tokens,
                domain=held.domain,
            )
        )

    def renew_due(self) -> None:
        """Queues a sign of life for each reservation whose lease is half over."""
        now = self.clock()
        for held in self.live.values():
            if now >= held.renew_at:
                held.renew_at = now + held.lease_s / 2
                self._enqueue(Report(reservation_id=held.reservation_id, kind=Report.KIND_ALIVE, domain=held.domain))

    def take(self, limit: int) -> list[Report]:
        """The next reports to send; give them back with `put_back` when sending failed."""
        return [self.queue.popleft() for _ in range(min(limit, len(self.queue)))]

    def put_back(self, reports: list[Report]) -> None:
        """Reports that did not arrive."""
        self.queue.extendleft(reversed(reports))
        self._bound()

    def for_restore(self) -> list[LiveReservation]:
        """What a restarted router has to know."""
        return [
            LiveReservation(
                reservation_id=held.reservation_id,
                request_id=held.request_id,
                domain=held.domain,
                decode=held.decode,
                tokens=held.tokens,
            )
            for held in self.live.values()
        ]

    def _enqueue(self, report: Report) -> None:
        self.queue.append(report)
        self._bound()
        self.on_work()

    def _bound(self) -> None:
        while len(self.queue) > MAX_QUEUED_REPORTS:
            self.queue.popleft()
            self.dropped += 1
