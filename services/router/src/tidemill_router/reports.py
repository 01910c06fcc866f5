"""What gateways tell of their requests: progress and outcomes free reservations, losses fence instances."""

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.router_pb2 import LiveReservation, Report, ReportResponse
from tidemill_router.fences import Fences
from tidemill_router.reservations import DECODE, PREFILL, Reservations

ENDS = {Report.KIND_DONE: "done", Report.KIND_FAILED: "failed", Report.KIND_CANCELLED: "cancelled"}


def apply_reports(reports: list[Report], reservations: Reservations, fences: Fences) -> ReportResponse:
    """Applies a batch; names the reservations that this router does not know (any more)."""
    unknown = [report.reservation_id for report in reports if not _apply(report, reservations, fences)]
    return ReportResponse(unknown_reservation_ids=unknown)


def restore(gateway: InstanceRef, live: list[LiveReservation], reservations: Reservations) -> None:
    """Takes over what a gateway has in flight, at a restarted router."""
    for item in live:
        reservations.reserve(
            DECODE if item.decode else PREFILL,
            (gateway.instance, gateway.incarnation),
            item.domain,
            prefill_tokens=0 if item.decode else item.tokens,
            request=(item.request_id, 0),
            reservation_id=item.reservation_id,
        )


def _apply(report: Report, reservations: Reservations, fences: Fences) -> bool:
    if report.kind == Report.KIND_FAILED and report.instance_lost and report.domain.instance:
        fences.fence(report.domain.instance, report.domain.incarnation)
    if report.kind in ENDS:
        return reservations.end(report.reservation_id, ENDS[report.kind])
    if report.kind == Report.KIND_PREFILLED:
        return reservations.prefilled(report.reservation_id)
    return reservations.renew(report.reservation_id)
