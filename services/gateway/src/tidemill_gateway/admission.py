"""Which requests may run now: places, a bounded queue for them, live request ids, and the drain."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError

FIRST_GUESS_S = 1.0
SMOOTHING = 0.05
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of what is taken in."""

    running: int
    queued: int
    per_tenant: int
    """0: no limit."""
    queue_wait_s: float


class Admission:
    """Counts and orders live requests; first come, first served."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self.running = 0
        self.live_ids: set[str] = set()
        self._limits = limits
        self._clock = clock
        self._mean_s = FIRST_GUESS_S
        """How long a place is taken."""
        self._tenants: Counter[str] = Counter()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def mean_request_s(self) -> float:
        """How long a request takes here."""
        return self._mean_s

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @asynccontextmanager
    async def admit(self, request_id: str, tenant: str) -> AsyncIterator[None]:
        """A place for the time of the block; refused at once when there is no room to wait."""
        self._check(request_id, tenant)
        self.live_ids.add(request_id)
        self._tenants[tenant] += 1
        self._idle.clear()
        try:
            await self._take_place()
            start = self._clock()
            try:
                yield
            finally:
                self._mean_s += SMOOTHING * (self._clock() - start - self._mean_s)
                self._give_place()
        finally:
            self.live_ids.discard(request_id)
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            if not self.live_ids:
                self._idle.set()

    def drain(self) -> None:
        """Takes nothing new from now on; what runs may finish."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Returns when nothing is live."""
        await self._idle.wait()

    def _check(self, request_id: str, tenant: str) -> None:
        if self.draining:
            raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "this gateway is shutting down", retry_after_s=0.5)
        if request_id in self.live_ids:
            raise MeshError(
                errors_pb2.ERROR_CODE_ALREADY_EXISTS, f"request {request_id!r} is alive here", field="request_id"
            )
        limit = self._limits.per_tenant
        if limit and self._tenants[tenant] >= limit:
            ends_in_s = self._mean_s / self._tenants[tenant]
            raise _exhausted("the tenant has too many requests at once", f"{limit} requests", ends_in_s)
        if self.running >= self._limits.running and len(self._queue) >= self._limits.queued:
            room = f"{self._limits.running}+{self._limits.queued} requests"
            raise _exhausted("the gateway is full", room, self._mean_s / self._limits.running)

    async def _take_place(self) -> None:
        if self.running < self._limits.running:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(self._limits.queue_wait_s):
                await asyncio.shield(turn)
        except BaseException as error:
            if turn.done():
                self._give_place()
            else:
                self._queue.remove(turn)
            if isinstance(error, TimeoutError):
                limit = f"{self._limits.queue_wait_s:g} s"
                drained_s = self._mean_s * (len(self._queue) + 1) / self._limits.running
                raise _exhausted("no place became free in time", limit, drained_s) from error
            raise

    def _give_place(self) -> None:
        """Hands the place to the first in the queue."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self.running -= 1


def _exhausted(message: str, limit: str, retry_after_s: float) -> MeshError:
    """`retry_after_s`: when room is predicted, as running requests end evenly spread over their mean time."""
    wait_s = min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s))
    return MeshError(errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, message, limit=limit, retry_after_s=wait_s)
