"""The gRPC faces of a worker: each method hands over to the module that decides."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tidemill.mesh.v1 import events_pb2, membership_pb2, transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_mesh.server import Servicer
from tidemill_worker.domain import Domain
from tidemill_worker.gateway_stream import serve_gateway
from tidemill_worker.hand_over_source import serve_pull
from tidemill_worker.kv_events import KvEvents
from tidemill_worker.load_reports import LoadReporter
from tidemill_worker.model_card import Assets
from tidemill_worker.status import counters_of
from tidemill_worker.translate import invalid
from tidemill_worker.worker import Worker

Context = grpc.aio.ServicerContext[Any, Any]

WORKER_SERVICE = "tidemill.mesh.v1.WorkerService"
TRANSFER_SERVICE = "tidemill.mesh.v1.TransferService"
RPCS = (
    *(
        f"{WORKER_SERVICE}/{name}"
        for name in ("Connect", "GetSnapshot", "GetAsset", "GetWorkerStatus", "Drain", "ResetCache")
    ),
    f"{TRANSFER_SERVICE}/Pull",
)
SNAPSHOT_BLOCKS_PER_MESSAGE = 8192


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """tidemill.mesh.v1.WorkerService."""

    def __init__(
        self,
        worker: Worker,
        events: KvEvents,
        load: LoadReporter,
        assets: Assets,
        *,
        record: Callable[[], membership_pb2.MembershipRecord],
        submitted: Callable[[Domain], None],
        drain: Callable[[float], None],
        holds: Callable[[], dict[str, int]],
    ) -> None:
        self._worker = worker
        self._events = events
        self._load = load
        self._assets = assets
        self._record = record
        self._submitted = submitted
        self._drain = drain
        self._holds = holds

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """One gateway's stream."""
        responses = serve_gateway(self._worker, request_iterator, self._submitted)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()  # type: ignore[attr-defined]

    async def GetSnapshot(
        self, request: worker_pb2.GetSnapshotRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetSnapshotResponse]:
        """A domain's blocks as of one sequence."""
        domain = self._domain(request.domain)
        ref, revision = self._worker.domain_ref(domain), self._worker.model.revision
        sequence, runs = self._events.snapshot(domain)
        part: list[events_pb2.BlockStored] = []
        for run in runs:
            part.append(run)
            if sum(len(item.block_hashes) for item in part) >= SNAPSHOT_BLOCKS_PER_MESSAGE * 16:
                yield worker_pb2.GetSnapshotResponse(
                    domain=ref, sequence=sequence, blocks=part, model_revision=revision
                )
                part = []
        yield worker_pb2.GetSnapshotResponse(
            domain=ref, sequence=sequence, blocks=part, last=True, model_revision=revision
        )

    async def GetAsset(
        self, request: worker_pb2.GetAssetRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetAssetResponse]:
        """A ModelCard or a file that it names."""
        async for part in self._assets.read(request.digest):
            yield worker_pb2.GetAssetResponse(data=part)

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.GetWorkerStatusResponse:
        """Record, loads, holds and counters."""
        return worker_pb2.GetWorkerStatusResponse(
            record=self._record(),
            loads=self._load.reports(),
            holds=self._holds(),
            counters=counters_of(self._worker),
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Begins to drain; the answer does not wait for the end."""
        if request.deadline_s < 0:
            raise invalid("a deadline is not negative", "deadline_s")
        self._drain(request.deadline_s)
        return worker_pb2.DrainResponse()

    async def ResetCache(
        self, request: worker_pb2.ResetCacheRequest, context: Context
    ) -> worker_pb2.ResetCacheResponse:
        """Drops the prefix caches of all domains."""
        blocks = 0
        for domain in self._worker.domains:
            blocks += self._events.num_blocks(domain)
            domain.send(messages.ResetCache())
        return worker_pb2.ResetCacheResponse(blocks=blocks)

    def _domain(self, index: int) -> Domain:
        if not 0 <= index < len(self._worker.domains):
            raise invalid(f"there is no domain {index}", "domain")
        domain = self._worker.domains[index]
        if not domain.up:
            raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, f"domain {index} is down: {domain.last_failure}")
        return domain


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """tidemill.mesh.v1.TransferService."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Pull(
        self, request: transfer_pb2.PullRequest, context: Context
    ) -> AsyncIterator[transfer_pb2.PullResponse]:
        """A decode worker fetches a request's KV."""
        responses = serve_pull(self._worker, request)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()  # type: ignore[attr-defined]


def servicers(worker_servicer: WorkerServicer, transfer_servicer: TransferServicer) -> list[Servicer]:
    """Both services, to be served."""
    return [
        Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker_servicer, WORKER_SERVICE),
        Servicer(transfer_pb2_grpc.add_TransferServiceServicer_to_server, transfer_servicer, TRANSFER_SERVICE),
    ]
