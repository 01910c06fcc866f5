"""An emulated kvstore: the real wire and transfer agent over blocks in memory, with faults on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from structlog.contextvars import get_contextvars
from worker_rig import Servers

from tidemill.mesh.v1 import kvstore_pb2, kvstore_pb2_grpc, membership_pb2
from tidemill_kvcache.hashing import split_hashes
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership import Membership
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_transfer.agent import TransferAgent, open_agent
from tidemill_transfer.checksum import checksum64

Key = tuple[str, str, bytes]


class EmulatedKvStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Blocks by (format, shard, hash)."""

    def __init__(self, agent: TransferAgent) -> None:
        self.blocks: dict[Key, tuple[kvstore_pb2.BlockHeader, np.ndarray[Any, np.dtype[np.uint8]]]] = {}
        self.gets = 0
        self.corrupt = False
        self.silent = False
        self.hides = False
        """Has finds nothing."""
        self.asked_for: dict[str, set[str]] = {"has": set(), "get": set(), "put": set()}
        """Requests for which each call came."""
        self._agent = agent
        self._sends: set[asyncio.Task[None]] = set()

    async def Put(self, request: kvstore_pb2.PutRequest, context: Any) -> kvstore_pb2.PutResponse:
        self._note("put")
        assert request.contiguous
        data = np.empty(sum(header.size_bytes for header in request.blocks), np.uint8)
        await self._agent.recv(request.source_address, request.first_tag, data, request.deadline_s)
        offset = 0
        for header in request.blocks:
            part = data[offset : offset + header.size_bytes]
            header.checksum = checksum64(part)
            self.blocks[header.kv_format, header.shard, header.block_hash] = (header, part)
            offset += header.size_bytes
        return kvstore_pb2.PutResponse(stored=[True] * len(request.blocks))

    async def Has(self, request: kvstore_pb2.HasRequest, context: Any) -> kvstore_pb2.HasResponse:
        if self.silent:
            await asyncio.sleep(60)
        self._note("has")
        if self.hides:
            return kvstore_pb2.HasResponse()
        found = [self._find(request, block_hash) for block_hash in split_hashes(request.block_hashes)]
        present = [block is not None for block in found]
        with_snapshot = [block is not None and block[0].has_snapshot for block in found]
        return kvstore_pb2.HasResponse(
            num_blocks=len(self._leading(request)),
            snapshot_bitmap=bitmap(with_snapshot),
            present_bitmap=bitmap(present),
            shards=sorted({shard for kv_format, shard, _ in self.blocks if kv_format == request.kv_format}),
        )

    async def Get(self, request: kvstore_pb2.GetRequest, context: Any) -> kvstore_pb2.GetResponse:
        self._note("get")
        found = self._leading(request)
        self.gets += 1
        data = np.concatenate([part for _, part in found]) if found else np.empty(0, np.uint8)
        if self.corrupt and len(data):
            data[len(data) // 2] ^= 1
        if found:
            send = self._agent.send(request.dest_address, request.tag, data, request.deadline_s)
            task = asyncio.create_task(send)
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)
        return kvstore_pb2.GetResponse(blocks=[header for header, _ in found], size_bytes=data.nbytes)

    def _note(self, call: str) -> None:
        self.asked_for[call].add(get_contextvars().get("request_id", ""))

    def _leading(self, request: Any) -> list[Any]:
        found = []
        for block_hash in split_hashes(request.block_hashes):
            block = self._find(request, block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _find(self, request: Any, block_hash: bytes) -> Any:
        return self.blocks.get((request.kv_format, request.shard, block_hash))


def bitmap(flags: list[bool]) -> bytes:
    """Bit i is flag i, little endian."""
    bits = sum(1 << index for index, flag in enumerate(flags) if flag)
    return bits.to_bytes(len(flags) // 8 + 1, "little")


@asynccontextmanager
async def running_store(servers: Servers, instance: str, mesh: str) -> AsyncIterator[EmulatedKvStore]:
    """A store in this process, registered in a mesh."""
    settings = ServiceSettings(mesh=mesh, instance=instance, etcd=servers.etcd, nats=servers.nats, liveness_s=30.0)
    agent = await open_agent("tcp", "127.0.0.1")
    store = EmulatedKvStore(agent)
    name = "tidemill.mesh.v1.KvStoreService"
    servicer = Servicer(kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, store, name)
    membership = Membership(settings)
    async with serve_grpc(settings, [servicer]) as server:
        await membership.start()
        record = membership_pb2.MembershipRecord(
            instance=instance,
            role=membership_pb2.ROLE_KVSTORE,
            endpoint=server.endpoint,
            transfer_address=agent.address,
        )
        await membership.register(record)
        try:
            yield store
        finally:
            await membership.close()
    await agent.close()
