"""RouterService: translates between the wire and the router."""

import time
from typing import Any

import grpc

from tidemill.mesh.v1 import router_pb2
from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.router_pb2 import (
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
)
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceServicer
from tidemill_mesh.errors import MeshError, code_name
from tidemill_mesh.service import ServiceContext
from tidemill_router.app import RouterParts
from tidemill_router.reports import apply_reports, restore
from tidemill_router.status import router_status

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(RouterServiceServicer):
    """The RPCs of the router."""

    def __init__(self, context: ServiceContext, parts: RouterParts) -> None:
        self._context = context
        self._parts = parts

    async def PlacePrefill(self, request: PlacePrefillRequest, context: Context) -> PlacePrefillResponse:
        """Chooses where a request starts."""
        metrics, start = self._parts.metrics, time.perf_counter()
        try:
            response = self._parts.router.place_prefill(request)
        except MeshError as error:
            metrics.placements.labels(stage="prefill", outcome=code_name(error.code).lower()).inc()
            raise
        outcome = "degraded" if "degraded" in response.terms else "whole" if response.whole else "placed"
        metrics.placements.labels(stage="prefill", outcome=outcome).inc()
        metrics.placement_seconds.labels(stage="prefill").observe(time.perf_counter() - start)
        metrics.prompt_tokens.inc(request.prompt_tokens)
        for tier in ("l1", "l2", "l3"):
            metrics.expected_cached.labels(tier=tier).inc(getattr(response.expected_cached, tier))
        return response

    async def PlaceDecode(self, request: PlaceDecodeRequest, context: Context) -> PlaceDecodeResponse:
        """Chooses where a request goes on."""
        metrics, start = self._parts.metrics, time.perf_counter()
        try:
            response = self._parts.router.place_decode(request)
        except MeshError as error:
            metrics.placements.labels(stage="decode", outcome=code_name(error.code).lower()).inc()
            raise
        outcome = "over_high_water" if "over_high_water" in response.terms else "placed"
        metrics.placements.labels(stage="decode", outcome=outcome).inc()
        metrics.placement_seconds.labels(stage="decode").observe(time.perf_counter() - start)
        return response

    async def Report(self, request: ReportRequest, context: Context) -> ReportResponse:
        """Takes progress and outcomes."""
        for report in request.reports:
            self._observe(report)
        return apply_reports(list(request.reports), self._parts.reservations, self._parts.fences)

    async def Restore(self, request: RestoreRequest, context: Context) -> RestoreResponse:
        """Takes over a gateway's reservations."""
        restore(request.gateway, list(request.reservations), self._parts.reservations)
        return RestoreResponse()

    async def GetRouterStatus(self, request: GetRouterStatusRequest, context: Context) -> GetRouterStatusResponse:
        """Shows the router's view."""
        me = InstanceRef(instance=self._context.instance, incarnation=self._context.membership.incarnation)
        return router_status(self._parts, me)

    def _observe(self, report: router_pb2.Report) -> None:
        found = self._parts.reservations.get(report.reservation_id)
        if report.kind == router_pb2.Report.KIND_PREFILLED and report.measured_s > 0 and found is not None:
            self._parts.metrics.measured_ttft.observe(report.measured_s)
            self._parts.metrics.ttft_error.observe(abs(report.measured_s - found.predicted_s))
