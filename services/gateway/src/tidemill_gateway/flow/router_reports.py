"""Sends reports to the router in batches, renews reservations, and restores them to a router that forgot them."""

import asyncio
from collections.abc import Callable

import grpc
import structlog

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.membership_pb2 import MembershipRecord
from tidemill.mesh.v1.router_pb2 import ReportRequest, RestoreRequest
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceStub
from tidemill_gateway.flow.reservations import Reservations
from tidemill_gateway.flow.router_client import RouterClient
from tidemill_gateway.flow.router_link import RouterAway
from tidemill_mesh.channels import Channels
from tidemill_mesh.errors import MeshError

INTERVAL_S = 0.05
BATCH = 512
TIMEOUT_S = 2.0

log = structlog.get_logger()


class RouterReports:
    """The task behind `Reservations`."""

    def __init__(
        self,
        reservations: Reservations,
        router: Callable[[], MembershipRecord | None],
        channels: Channels,
        client: RouterClient,
        gateway: Callable[[], InstanceRef],
    ) -> None:
        self._reservations = reservations
        self._router = router
        self._channels = channels
        self._client = client
        self._gateway = gateway
        self._restored_to = ""
        self._work = asyncio.Event()
        reservations.on_work = self._work.set

    async def run(self) -> None:
        """Sends until cancelled; sleeps while there is nothing to say."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._reservations.live or self._reservations.queue:
                await asyncio.sleep(INTERVAL_S)
                await self.flush()

    async def flush(self) -> None:
        """Sends what waits; what does not arrive waits on."""
        self._reservations.renew_due()
        router = self._router()
        if router is None:
            return
        if router.incarnation != self._restored_to and not await self._restore(router):
            return
        while reports := self._reservations.take(BATCH):
            try:
                request = ReportRequest(gateway=self._gateway(), reports=reports)
                answer = await self._client.report(router, request, TIMEOUT_S)
            except (MeshError, RouterAway) as error:
                self._reservations.put_back(reports)
                log.warning("reports do not reach the router", router=router.instance, reason=str(error))
                return
            if any(known in self._reservations.live for known in answer.unknown_reservation_ids):
                self._restored_to = ""

    async def _restore(self, router: MembershipRecord) -> bool:
        stub = RouterServiceStub(self._channels.get(router.endpoint))
        live = self._reservations.for_restore()
        try:
            if live:
                await stub.Restore(RestoreRequest(gateway=self._gateway(), reservations=live), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("reservations cannot be restored yet", router=router.instance, reason=error.code().name)
            return False
        self._restored_to = router.incarnation
        return True
