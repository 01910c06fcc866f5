"""The gRPC services of a kvstore: its own, and the snapshot by which routers learn what it holds."""

from collections.abc import AsyncIterator, Callable

import grpc

from tidemill.mesh.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2
from tidemill_kvstore.gets import get, has
from tidemill_kvstore.kvstore import KvStore
from tidemill_kvstore.puts import put
from tidemill_kvstore.requests import invalid
from tidemill_mesh.server import Servicer

KVSTORE_SERVICE = "tidemill.mesh.v1.KvStoreService"
WORKER_SERVICE = "tidemill.mesh.v1.WorkerService"

RPCS = (
    f"{KVSTORE_SERVICE}/Put",
    f"{KVSTORE_SERVICE}/Get",
    f"{KVSTORE_SERVICE}/Has",
    f"{KVSTORE_SERVICE}/GetKvStoreStatus",
    f"{WORKER_SERVICE}/GetSnapshot",
)


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """KvStoreService."""

    def __init__(self, kvstore: KvStore, identity: Callable[[], common_pb2.InstanceRef]) -> None:
        self._kvstore = kvstore
        self._identity = identity

    async def Put(self, request: kvstore_pb2.PutRequest, context: object) -> kvstore_pb2.PutResponse:
        return await put(self._kvstore, request)

    async def Get(self, request: kvstore_pb2.GetRequest, context: object) -> kvstore_pb2.GetResponse:
        return await get(self._kvstore, request)

    async def Has(self, request: kvstore_pb2.HasRequest, context: object) -> kvstore_pb2.HasResponse:
        return has(self._kvstore, request)

    async def GetKvStoreStatus(
        self, request: kvstore_pb2.GetKvStoreStatusRequest, context: object
    ) -> kvstore_pb2.GetKvStoreStatusResponse:
        store = self._kvstore.store
        return kvstore_pb2.GetKvStoreStatusResponse(
            instance=self._identity(),
            capacity_bytes=store.capacity_bytes,
            used_bytes=store.used_bytes,
            blocks=store.num_blocks,
            holds=self._kvstore.holds,
            counters={**store.counters, **self._kvstore.counts.totals},
            tenant_bytes=store.tenant_bytes(),
        )


class SnapshotServicer:
    """GetSnapshot of WorkerService; its other RPCs are not offered (see the membership record)."""

    def __init__(self, kvstore: KvStore) -> None:
        self._kvstore = kvstore

    async def GetSnapshot(
        self, request: worker_pb2.GetSnapshotRequest, context: object
    ) -> AsyncIterator[worker_pb2.GetSnapshotResponse]:
        if request.domain:
            raise invalid("a kvstore is one domain", "domain", "0")
        self._kvstore.tell()
        replay = self._kvstore.presence.replay(request.known, request.known_sequence)
        if replay is not None:
            yield replay
            return
        for message in self._kvstore.presence.snapshot():
            yield message


def servicers(kvstore: KvStore, identity: Callable[[], common_pb2.InstanceRef]) -> list[Servicer]:
    """All services of a kvstore."""
    return [
        Servicer(
            kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, KvStoreServicer(kvstore, identity), KVSTORE_SERVICE
        ),
        Servicer(add_snapshot_servicer, SnapshotServicer(kvstore), WORKER_SERVICE),
    ]


def add_snapshot_servicer(servicer: SnapshotServicer, server: grpc.aio.Server) -> None:
    """Adds the one RPC; the rest of the service stays unimplemented."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.GetSnapshot,  # type: ignore[arg-type]
        request_deserializer=worker_pb2.GetSnapshotRequest.FromString,
        response_serializer=worker_pb2.GetSnapshotResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER_SERVICE, {"GetSnapshot": handler}),))
