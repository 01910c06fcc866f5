"""RouterService: translates between the wire and the router."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from tidemill.mesh.v1 import router_pb2
from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.router_pb2 import (
    GetReservationsRequest,
    GetReservationsResponse,
    GetRouterStatusRequest,
    GetRouterStatusResponse,
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
    ReportRequest,
    ReportResponse,
    RestoreRequest,
    RestoreResponse,
    RouterServiceConnectRequest,
    RouterServiceConnectResponse,
)
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceServicer
from tidemill_mesh.errors import MeshError, code_name
from tidemill_mesh.service import ServiceContext
from tidemill_router.app import RouterParts
from tidemill_router.reports import apply_reports, restore
from tidemill_router.status import router_status
from tidemill_router.stream import answer_all

Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger()


class Servicer(RouterServiceServicer):
    """The RPCs of the router."""

    def __init__(self, context: ServiceContext, parts: RouterParts) -> None:
        self._context = context
        self._parts = parts

    async def PlacePrefill(self, request: PlacePrefillRequest, context: Context) -> PlacePrefillResponse:
        """Chooses where a request starts."""
        return self.place_prefill(request)

    async def PlaceDecode(self, request: PlaceDecodeRequest, context: Context) -> PlaceDecodeResponse:
        """Chooses where a request goes on."""
        return self.place_decode(request)

    async def Report(self, request: ReportRequest, context: Context) -> ReportResponse:
        """Takes progress and outcomes."""
        return self.report(request)

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[RouterServiceConnectRequest], context: Context
    ) -> AsyncIterator[RouterServiceConnectResponse]:
        """The same three over one stream."""
        async for request in request_iterator:
            yield answer_all(request, self)

    def place_prefill(self, request: PlacePrefillRequest) -> PlacePrefillResponse:
        """Decides where a request starts, and counts it."""
        metrics, start = self._parts.metrics, time.perf_counter()
        try:
            response = self._parts.router.place_prefill(request)
        except MeshError as error:
            metrics.placements.labels(stage="prefill", outcome=code_name(error.code).lower()).inc()
            log.debug("not placed", stage="prefill", request_id=request.request_id, error=str(error))
            raise
        outcome = "degraded" if "degraded" in response.terms else "whole" if response.whole else "placed"
        metrics.placements.labels(stage="prefill", outcome=outcome).inc()
        metrics.placement_seconds.labels(stage="prefill").observe(time.perf_counter() - start)
        metrics.prompt_tokens.inc(request.prompt_tokens)
        for tier in ("l1", "l2", "l3"):
            metrics.expected_cached.labels(tier=tier).inc(getattr(response.expected_cached, tier))
        log.debug("placed", stage="prefill", request_id=request.request_id, choice=request.choice,
                  attempt=request.attempt, target=response.target.domain.instance, outcome=outcome)  # fmt: skip
        return response

    def place_decode(self, request: PlaceDecodeRequest) -> PlaceDecodeResponse:
        """Decides where a request goes on, and counts it."""
        metrics, start = self._parts.metrics, time.perf_counter()
        try:
            response = self._parts.router.place_decode(request)
        except MeshError as error:
            metrics.placements.labels(stage="decode", outcome=code_name(error.code).lower()).inc()
            log.debug("not placed", stage="decode", request_id=request.request_id, error=str(error))
            raise
        outcome = "over_high_water" if "over_high_water" in response.terms else "placed"
        metrics.placements.labels(stage="decode", outcome=outcome).inc()
        metrics.placement_seconds.labels(stage="decode").observe(time.perf_counter() - start)
        log.debug("placed", stage="decode", request_id=request.request_id, choice=request.choice,
                  attempt=request.attempt, target=response.target.domain.instance, outcome=outcome)  # fmt: skip
        return response

    def report(self, request: ReportRequest) -> ReportResponse:
        """Takes progress and outcomes."""
        for report in request.reports:
            self._observe(report)
        return apply_reports(list(request.reports), self._parts.reservations, self._parts.fences)

    async def Restore(self, request: RestoreRequest, context: Context) -> RestoreResponse:
        """Takes over a gateway's reservations."""
        restore(request.gateway, list(request.reservations), self._parts.reservations)
        return RestoreResponse()

    async def GetReservations(self, request: GetReservationsRequest, context: Context) -> GetReservationsResponse:
        """Lets a replica catch up."""
        return self._parts.replica_log.snapshot(self._parts.reservations.of_origin(""))

    async def GetRouterStatus(self, request: GetRouterStatusRequest, context: Context) -> GetRouterStatusResponse:
        """Shows the router's view."""
        me = InstanceRef(instance=self._context.instance, incarnation=self._context.membership.incarnation)
        return router_status(self._parts, me)

    def _observe(self, report: router_pb2.Report) -> None:
        found = self._parts.reservations.get(report.reservation_id)
        if report.kind == router_pb2.Report.KIND_PREFILLED and report.measured_s > 0 and found is not None:
            self._parts.metrics.measured_ttft.observe(report.measured_s)
            self._parts.metrics.ttft_error.observe(abs(report.measured_s - found.predicted_s))
