"""gRPC's health protocol: one status for the process and each of its services, for those who ask and who watch.

Not the servicer that comes with gRPC: there, a watcher that leaves takes the news from the others of its service, and
no Watch ever ends, so that a server with one client that watches takes all of its grace to stop.
"""

import asyncio
from collections.abc import Iterable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_mesh.interceptor import Context

OVERALL = ""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """NOT_SERVING until told otherwise, and for good once ended; to be used from the server's event loop."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset((OVERALL, *services))
        self._serving = False
        self._ended = False
        self._watchers: set[asyncio.Event] = set()

    def set_serving(self, serving: bool) -> None:
        """Sets the status; without effect after `end`."""
        self._serving = serving and not self._ended
        self._wake_watchers()

    def end(self) -> None:
        """Each Watch says NOT_SERVING, if it has not said so, and ends."""
        self._ended = True
        self._serving = False
        self._wake_watchers()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "no such service", field="service")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status and each change of it, those left out that another follows at once; SERVICE_UNKNOWN stays."""
        is_known = request.service in self._services
        changed = asyncio.Event()
        self._watchers.add(changed)
        told = None
        try:
            while True:
                changed.clear()
                ended, status = self._ended, self._status if is_known else SERVICE_UNKNOWN
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                if ended:
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    @property
    def _status(self) -> int:
        return SERVING if self._serving else NOT_SERVING  # type: ignore[no-any-return]

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()
