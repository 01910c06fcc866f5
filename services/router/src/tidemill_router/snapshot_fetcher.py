"""Fetches what the index lacks of workers, in the background; a slow worker stays cold and keeps nobody waiting."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import structlog

from tidemill.mesh.v1.worker_pb2 import GetSnapshotRequest
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceStub
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.tracker import EventTracker
from tidemill_mesh.channels import Channels
from tidemill_mesh.log import RateLimit

if TYPE_CHECKING:
    from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceAsyncStub

POLL_S = 0.05
LOG_INTERVAL_S = 5.0

log = structlog.get_logger()


class SnapshotFetcher:
    """Starts a fetch for each domain that is due, at most `concurrency` at a time, first those that failed least."""

    def __init__(
        self,
        tracker: EventTracker,
        channels: Channels,
        endpoint_of: Callable[[str], str],
        clock: Callable[[], float],
        *,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self.blocks = 0
        """Hashes received in snapshots, for the metric."""
        self._tracker = tracker
        self._channels = channels
        self._endpoint_of = endpoint_of
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._running: set[Holder] = set()
        self._failure_log = RateLimit(LOG_INTERVAL_S, clock)

    @property
    def running(self) -> int:
        """Fetches under way."""
        return len(self._running)

    async def run(self) -> None:
        """Fetches until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for holder in self._next():
                    self._running.add(holder)
                    group.create_task(self._fetch(holder), name=f"snapshot {holder[0]}/{holder[1]}")
                await asyncio.sleep(POLL_S)

    def _next(self) -> list[Holder]:
        due = [holder for holder in self._tracker.due() if holder not in self._running]
        due.sort(key=self._failures)
        return due[: max(0, self._concurrency - len(self._running))]

    def _failures(self, holder: Holder) -> int:
        track = self._tracker.get(holder)
        return track.failures if track else 0

    async def _fetch(self, holder: Holder) -> None:
        fetch_id = self._tracker.begin(holder)
        try:
            await self._receive(holder, fetch_id)
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._failed(holder, fetch_id, error)
        except Exception as error:
            log.exception("a snapshot could not be applied", instance=holder[0], domain=holder[1])
            self._failed(holder, fetch_id, error)
        finally:
            self._running.discard(holder)

    async def _receive(self, holder: Holder, fetch_id: int) -> None:
        endpoint = self._endpoint_of(holder[0])
        if not endpoint:
            raise ValueError("the instance has left")
        known = self._tracker.known(holder)
        request = GetSnapshotRequest(domain=holder[1])
        if known is not None:
            request.known.CopyFrom(known[0])
            request.known_sequence = known[1]
        stub: WorkerServiceAsyncStub = WorkerServiceStub(self._channels.get(endpoint))
        async for part in stub.GetSnapshot(request, timeout=self._timeout_s):
            if (part.domain.instance, part.domain.domain) != holder:
                raise ValueError(f"the snapshot is of {part.domain.instance}/{part.domain.domain}")
            if part.replay:
                self._tracker.replay(fetch_id, part.domain, part.batches)
                return
            self._tracker.add_snapshot_blocks(holder, fetch_id, part.blocks)
            self.blocks += sum(len(run.block_hashes) // 16 for run in part.blocks)
            if part.last:
                self._tracker.complete(fetch_id, part.domain, part.sequence)
                return
        raise ValueError("the snapshot ended without its last part")

    def _failed(self, holder: Holder, fetch_id: int, error: Exception) -> None:
        self._tracker.fail(holder, fetch_id)
        if (suppressed := self._failure_log.passes()) is not None:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
            log.warning("no snapshot of a worker's blocks yet: it counts as cold", instance=holder[0],
                        domain=holder[1], reason=reason, more=suppressed)  # fmt: skip
