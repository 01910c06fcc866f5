"""Calls to routers: over one stream where a router offers that, else call by call."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc

from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER, MembershipRecord
from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
    ReportRequest,
    ReportResponse,
    RouterCall,
)
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceStub
from tidemill_gateway.flow.router_link import RouterAway, RouterLink
from tidemill_mesh.channels import Channels
from tidemill_mesh.errors import STATUS_DETAILS_KEY, from_rpc_error
from tidemill_mesh.membership import InstanceView

if TYPE_CHECKING:
    from tidemill.mesh.v1.router_pb2_grpc import RouterServiceAsyncStub

CONNECT_RPC = "tidemill.mesh.v1.RouterService/Connect"
SWEEP_S = 1.0

Response = TypeVar("Response")


class RouterClient:
    """Every call raises MeshError where the router refuses, and RouterAway where it does not answer in time."""

    def __init__(self, instances: InstanceView, channels: Channels) -> None:
        self._instances = instances
        self._channels = channels
        self._links: dict[str, RouterLink] = {}
        """By incarnation."""

    async def run(self) -> None:
        """Closes the streams of routers that have left; ends all when cancelled."""
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                known = {r.incarnation for r in self._instances.records.values() if r.role == ROLE_ROUTER}
                for incarnation in [i for i in self._links if i not in known]:
                    await self._links.pop(incarnation).close()
        finally:
            await asyncio.gather(*(link.close() for link in self._links.values()))

    async def place_prefill(
        self, router: MembershipRecord, request: PlacePrefillRequest, timeout_s: float
    ) -> PlacePrefillResponse:
        """Where a request starts."""
        if CONNECT_RPC in router.rpcs:
            return (await self._link(router).ask(RouterCall(place_prefill=request), timeout_s)).place_prefill
        return await self._call(router, lambda stub: stub.PlacePrefill(request, timeout=timeout_s))

    async def place_decode(
        self, router: MembershipRecord, request: PlaceDecodeRequest, timeout_s: float
    ) -> PlaceDecodeResponse:
        """Where it goes on."""
        if CONNECT_RPC in router.rpcs:
            return (await self._link(router).ask(RouterCall(place_decode=request), timeout_s)).place_decode
        return await self._call(router, lambda stub: stub.PlaceDecode(request, timeout=timeout_s))

    async def report(self, router: MembershipRecord, request: ReportRequest, timeout_s: float) -> ReportResponse:
        """Progress and outcomes."""
        if CONNECT_RPC in router.rpcs:
            return (await self._link(router).ask(RouterCall(report=request), timeout_s)).report
        return await self._call(router, lambda stub: stub.Report(request, timeout=timeout_s))

    def _link(self, router: MembershipRecord) -> RouterLink:
        link = self._links.get(router.incarnation)
        if link is None or link.broken:
            dial = partial(self._channels.open_stream, CONNECT_RPC, (router.stream_endpoint, router.endpoint))
            link = RouterLink(router.instance, dial)
            self._links[router.incarnation] = link
        return link

    async def _call(
        self, router: MembershipRecord, call: "Callable[[RouterServiceAsyncStub], Awaitable[Response]]"
    ) -> Response:
        try:
            return await call(RouterServiceStub(self._channels.get(router.endpoint)))
        except grpc.aio.AioRpcError as error:
            if any(key == STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
                raise from_rpc_error(error) from error
            raise RouterAway(f"{router.instance}: {error.code().name}") from error
