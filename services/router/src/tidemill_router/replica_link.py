"""Between the replicas and the wire: sends what this router places, takes in what the others do."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.message import DecodeError

from tidemill.mesh.v1.router_pb2 import GetReservationsRequest, ReservationBatch
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceStub
from tidemill_mesh.bus import Bus
from tidemill_mesh.channels import Channels
from tidemill_mesh.log import RateLimit
from tidemill_mesh.tasks import wait_up_to
from tidemill_router.replica_log import HEARTBEAT_S, ReplicaLog
from tidemill_router.replicas import RETRY_S, Replicas

if TYPE_CHECKING:
    from tidemill.mesh.v1.router_pb2_grpc import RouterServiceAsyncStub

GATHER_S = 0.002
"""Changes of so long go in one message."""
FETCH_TIMEOUT_S = 5.0
LOG_INTERVAL_S = 5.0

log = structlog.get_logger()


def reservation_subject(mesh: str, instance: str = "*") -> str:
    """NATS subject of a router's reservations; "*": of all."""
    return f"tidemill.{mesh}.reservations.{instance}"


class ReplicaLink:
    """Two loops and a bus callback."""

    def __init__(
        self,
        replicas: Replicas,
        replica_log: ReplicaLog,
        bus: Bus,
        subject: str,
        channels: Channels,
        endpoint_of: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._replicas = replicas
        self._log = replica_log
        self._bus = bus
        self._subject = subject
        self._channels = channels
        self._endpoint_of = endpoint_of
        self._wake = asyncio.Event()
        self._failure_log = RateLimit(LOG_INTERVAL_S, clock)
        self._due = asyncio.Event()
        replica_log.on_change = self._wake.set
        replicas.on_due = self._due.set

    def on_message(self, subject: str, payload: bytes) -> None:
        """Bus callback; this router's own messages come back too."""
        if subject == self._subject:
            return
        try:
            self._replicas.receive(ReservationBatch.FromString(payload))
        except (DecodeError, ValueError) as error:
            # The replica's next batch shows a gap, which its list heals.
            self._replicas.counters["unreadable"] += 1
            log.warning("a replica's reservations cannot be read", error=str(error), bytes=len(payload))

    async def tell(self) -> None:
        """Publishes changes soon after they happen, and a heartbeat when there are none, until cancelled."""
        while True:
            if await wait_up_to(self._wake, HEARTBEAT_S / 2):
                await asyncio.sleep(GATHER_S)
            self._wake.clear()
            for batch in self._log.batches():
                self._bus.publish(self._subject, batch.SerializeToString())

    async def fetch(self) -> None:
        """Fetches lists that are due until cancelled; a slow router keeps the others waiting for its timeout only."""
        async with asyncio.TaskGroup() as group:
            while True:
                for instance in self._replicas.due():
                    self._replicas.begin(instance)
                    group.create_task(self._fetch(instance), name=f"reservations of {instance}")
                self._due.clear()
                await wait_up_to(self._due, RETRY_S)

    async def _fetch(self, instance: str) -> None:
        try:
            endpoint = self._endpoint_of(instance)
            if not endpoint:
                raise ValueError("the router has left")
            stub: RouterServiceAsyncStub = RouterServiceStub(self._channels.get(endpoint))
            self._replicas.complete(await stub.GetReservations(GetReservationsRequest(), timeout=FETCH_TIMEOUT_S))
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._replicas.fail(instance)
            if (suppressed := self._failure_log.passes()) is not None:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.warning("no list of a replica's reservations yet", instance=instance, reason=reason,
                            more=suppressed)  # fmt: skip
