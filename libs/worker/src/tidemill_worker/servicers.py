"""The gRPC faces of a worker: each method hands over to the module that decides."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from tidemill.mesh.v1 import (
    common_pb2,
    membership_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.snapshot_parts import snapshot_parts
from tidemill_mesh.errors import MeshError
from tidemill_mesh.server import Servicer
from tidemill_mesh.streams.bridge import async_handler
from tidemill_worker.domain import Domain
from tidemill_worker.gateway_stream import serve_gateway
from tidemill_worker.hand_over_source import serve_pull
from tidemill_worker.kv_events import KvEvents
from tidemill_worker.load_reports import LoadReporter
from tidemill_worker.model_card import Assets
from tidemill_worker.status import counters_of
from tidemill_worker.tiers import Tiers
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
    f"{TRANSFER_SERVICE}/FetchBlocks",
)
HOT_PREFIXES = 10


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
        tiers: Tiers,
        submitted: Callable[[Domain], None],
        drain: Callable[[float], None],
        holds: Callable[[], dict[str, int]],
    ) -> None:
        self._worker = worker
        self._events = events
        self._load = load
        self._assets = assets
        self._record = record
        self._tiers = tiers
        self._submitted = submitted
        self._drain = drain
        self._holds = holds

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """One gateway's stream."""
        responses = self.serve_gateway(request_iterator)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()

    def serve_gateway(
        self, requests: AsyncIterator[worker_pb2.ConnectRequest]
    ) -> AsyncGenerator[worker_pb2.ConnectResponse, None]:
        """The same, on either of the worker's ports."""
        return serve_gateway(self._worker, requests, self._submitted)

    async def GetSnapshot(
        self, request: worker_pb2.GetSnapshotRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetSnapshotResponse]:
        """A domain's blocks as of one sequence, or the batches that the caller lacks."""
        domain = self._domain(request.domain)
        ref, revision = self._worker.domain_ref(domain), self._worker.model.revision
        batches = self._events.replay(domain, request.known, request.known_sequence)
        if batches is not None:
            yield worker_pb2.GetSnapshotResponse(domain=ref, replay=True, batches=batches, last=True)
            return
        for part in snapshot_parts(ref, *self._events.snapshot(domain), revision):
            yield part

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
            tiers=tier_use(self._load, self._tiers),
            hot_prefixes=[
                worker_pb2.HotPrefix(
                    block_hash=prefix.block_hash,
                    tokens=prefix.num_blocks * self._worker.settings.block_size,
                    hits=prefix.hits,
                    tenant=prefix.tenant,
                )
                for prefix in self._tiers.hottest(HOT_PREFIXES)
            ],
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

    def __init__(self, worker: Worker, tiers: Tiers) -> None:
        self._worker = worker
        self._tiers = tiers

    async def FetchBlocks(
        self, request: transfer_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[transfer_pb2.FetchBlocksResponse]:
        """Another instance takes blocks that this one holds."""
        responses = self._tiers.serve(request)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()  # type: ignore[attr-defined]

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


def tier_use(load: LoadReporter, tiers: Tiers) -> list[worker_pb2.TierUse]:
    """Blocks in L1 and L2 and room for them."""
    samples = [sample for _, sample in load.samples()]
    l1 = worker_pb2.TierUse(
        tier=common_pb2.TIER_L1,
        used_blocks=sum(sample.cached_blocks for sample in samples),
        capacity_blocks=sum(sample.total_blocks for sample in samples),
    )
    use = tiers.l2_use().values()
    l2 = worker_pb2.TierUse(
        tier=common_pb2.TIER_L2,
        used_blocks=sum(used for used, _ in use),
        capacity_blocks=sum(slots for _, slots in use),
    )
    return [l1, l2]


def servicers(worker_servicer: WorkerServicer, transfer_servicer: TransferServicer) -> list[Servicer]:
    """Both services, to be served."""
    connect = f"{WORKER_SERVICE}/Connect"
    streams = {connect: async_handler(connect, worker_servicer.serve_gateway, worker_pb2.ConnectRequest)}
    return [
        Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker_servicer, WORKER_SERVICE, streams),
        Servicer(transfer_pb2_grpc.add_TransferServiceServicer_to_server, transfer_servicer, TRANSFER_SERVICE),
    ]
