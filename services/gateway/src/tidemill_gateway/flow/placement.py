"""Asks the router where stages run; places by this gateway's own view while no router answers, and says so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER, MembershipRecord
from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
)
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow import local_placement
from tidemill_gateway.flow.router_client import RouterClient
from tidemill_gateway.flow.router_link import RouterAway
from tidemill_gateway.flow.worker_links import WorkerLinks
from tidemill_mesh.errors import MeshError
from tidemill_mesh.membership import InstanceView

MAX_ROUTER_WAIT_S = 1.0
FIRST_PENALTY_S = 0.25
MAX_DOUBLINGS = 4
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.4)

Response = TypeVar("Response")

log = structlog.get_logger()


class Placer:
    """Places stages; waits a bounded time for instances that are starting."""

    def __init__(
        self,
        instances: InstanceView,
        client: RouterClient,
        links: WorkerLinks,
        liveness_s: float,
        clock: Callable[[], float],
        shunned: local_placement.Shunned = lambda taker: (),
    ) -> None:
        self.degraded_placements = 0
        self._instances = instances
        self._client = client
        self._links = links
        self._shunned = shunned
        self._router_wait_s = min(MAX_ROUTER_WAIT_S, liveness_s)
        self._clock = clock
        self._failures = 0
        self._lacks_router = False
        self._avoid_until: dict[str, float] = {}

    def router(self) -> MembershipRecord | None:
        """The router to ask: the same one as long as it answers."""
        now = self._clock()
        routers = [r for r in self._instances.records.values() if r.role == ROLE_ROUTER and not r.draining]
        answering = [r for r in routers if self._avoid_until.get(r.incarnation, 0.0) <= now]
        return min(answering, key=lambda record: record.instance, default=None)

    async def prefill(
        self, request: PlacePrefillRequest, wait_s: float, wanted: Callable[[], bool]
    ) -> tuple[PlacePrefillResponse, bool]:
        """Where a request starts, and whether the router was bypassed.

        UNAVAILABLE after wait_s without a place, or when it is not `wanted` any more.
        """
        wait_router_s = self._router_wait_s

        async def ask() -> tuple[PlacePrefillResponse, bool]:
            try:
                return await self._ask(lambda router: self._client.place_prefill(router, request, wait_router_s)), False
            except RouterAway as reason:
                placed = local_placement.place_prefill(
                    self._instances.records,
                    request.model_revision,
                    request.excluded_instances,
                    self._legs,
                    self._shunned,
                )
                return self._bypassed(placed, reason), True

        return await self._patiently(ask, request, wait_s, wanted)

    async def decode(
        self, request: PlaceDecodeRequest, wait_s: float, wanted: Callable[[], bool]
    ) -> tuple[PlaceDecodeResponse, bool]:
        """Where a prefilled request goes on; as `prefill`."""
        wait_router_s = self._router_wait_s

        async def ask() -> tuple[PlaceDecodeResponse, bool]:
            try:
                return await self._ask(lambda router: self._client.place_decode(router, request, wait_router_s)), False
            except RouterAway as reason:
                placed = local_placement.place_decode(
                    self._instances.records,
                    request.model_revision,
                    request.excluded_instances,
                    self._legs,
                    self._shunned,
                    request.prefill.domain.instance,
                )
                return self._bypassed(placed, reason), True

        return await self._patiently(ask, request, wait_s, wanted)

    async def _patiently(
        self,
        ask: Callable[[], Awaitable[tuple[Response, bool]]],
        request: PlacePrefillRequest | PlaceDecodeRequest,
        wait_s: float,
        wanted: Callable[[], bool],
    ) -> tuple[Response, bool]:
        """Asks again while there is no place; an instance that failed this request is allowed again then."""
        give_up_at = self._clock() + wait_s
        attempt = 0
        while True:
            try:
                return await ask()
            except MeshError as error:
                delay_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                if error.code != errors_pb2.ERROR_CODE_UNAVAILABLE or self._clock() + delay_s > give_up_at:
                    raise
                await asyncio.sleep(delay_s)
                if not wanted():
                    raise
            request.ClearField("excluded_instances")
            attempt += 1

    async def _ask(self, call: Callable[[MembershipRecord], Awaitable[Response]]) -> Response:
        router = self.router()
        if router is None:
            reason = RouterAway("no router is registered, or none has answered lately")
            if not self._failures and not self._lacks_router:
                log.warning("the router does not answer: placing without it", router="", reason=str(reason))
            self._lacks_router = True
            raise reason
        failures = self._failures
        if failures:
            # One request tries whether it is back; the others do not wait for that.
            self._avoid_until[router.incarnation] = self._clock() + self._router_wait_s
        try:
            response = await call(router)
        except MeshError:
            self._answered()
            raise
        except RouterAway as reason:
            self._failed(router, failures)
            log.warning("the router does not answer: placing without it", router=router.instance, reason=str(reason))
            raise
        self._answered()
        return response

    def _failed(self, router: MembershipRecord, failures: int) -> None:
        """Avoids the router, for longer each time; what was asked after the same failures is one failure more."""
        penalty_s = FIRST_PENALTY_S * 2 ** min(failures, MAX_DOUBLINGS)
        if failures == self._failures:
            self._failures += 1
        self._avoid_until = {router.incarnation: self._clock() + penalty_s}

    def _answered(self) -> None:
        self._failures, self._lacks_router = 0, False
        self._avoid_until.clear()

    def _bypassed(self, placed: Response | None, reason: RouterAway) -> Response:
        if placed is None:
            raise MeshError(
                errors_pb2.ERROR_CODE_UNAVAILABLE, f"no instance serves the model now ({reason})", retry_after_s=1
            )
        self.degraded_placements += 1
        return placed

    def _legs(self, instance: str, incarnation: str, domain: int) -> int | None:
        link = self._links.get(instance, incarnation)
        if link is None or not link.up:
            return None
        return sum(leg.target.domain.domain == domain for leg in link.legs.values())
