"""An emulated holder of blocks: the real wire and transfer agent, but a byte is flipped on the way, or none is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from tidemill.mesh.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc, worker_pb2
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_transfer.agent import TransferAgent, TransportName, new_tag, open_agent
from tidemill_transfer.checksum import checksum64


class FlippingPeer(transfer_pb2_grpc.TransferServiceServicer):
    """Offers every asked block, in the caller's own layout; `pull_blocks` to one that takes over a request."""

    def __init__(self, agent: TransferAgent, block_bytes: int) -> None:
        self.fetches = 0
        self.pull_blocks = 0
        self.flips = True
        self.is_mute = False
        """Announces what it does not send."""
        self._agent = agent
        self._block_bytes = block_bytes

    async def FetchBlocks(
        self, request: transfer_pb2.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[transfer_pb2.FetchBlocksResponse]:
        """Announces the checksums of what it meant to send."""
        self.fetches += 1
        count = len(request.block_hashes) // 16
        layout, piece, checksum = self._announced(request.layout, count)
        yield transfer_pb2.FetchBlocksResponse(source_layout=layout, num_blocks=count, pieces=[piece])
        await self._send(request.layout.ranks[0].transfer_address, piece, request.deadline_s)
        yield transfer_pb2.FetchBlocksResponse(checksums=[checksum])

    async def Pull(self, request: transfer_pb2.PullRequest, context: Any) -> AsyncIterator[transfer_pb2.PullResponse]:
        """The same of a request's KV, whose state follows."""
        layout, piece, checksum = self._announced(request.layout, self.pull_blocks)
        yield transfer_pb2.PullResponse(source_layout=layout)
        slab = transfer_pb2.Slab(num_blocks=self.pull_blocks, pieces=[piece])
        yield transfer_pb2.PullResponse(slab=slab)
        await self._send(request.layout.ranks[0].transfer_address, piece, request.deadline_s)
        slab.checksums.append(checksum)
        yield transfer_pb2.PullResponse(slab=slab)
        yield transfer_pb2.PullResponse(state=worker_pb2.RequestState(version=1, key=request.key))

    def _announced(
        self, taker: transfer_pb2.KVLayout, count: int
    ) -> tuple[transfer_pb2.KVLayout, transfer_pb2.Piece, int]:
        """This peer's layout, the piece that holds so many blocks, and its checksum."""
        layout = transfer_pb2.KVLayout()
        layout.CopyFrom(taker)
        layout.ranks[0].transfer_address = self._agent.address
        size_bytes, rank = count * self._block_bytes, taker.ranks[0]
        piece = transfer_pb2.Piece(
            tag=new_tag(), size_bytes=size_bytes, head_start=rank.head_start, head_end=rank.head_end
        )
        return layout, piece, checksum64(np.zeros(size_bytes, np.uint8))

    async def _send(self, address: str, piece: transfer_pb2.Piece, deadline_s: float) -> None:
        data = np.zeros(piece.size_bytes, np.uint8)
        data[data.nbytes // 2] ^= self.flips
        if self.is_mute:
            await asyncio.sleep(deadline_s)
        await self._agent.send(address, piece.tag, data, deadline_s)


@asynccontextmanager
async def flipping_peer(
    block_bytes: int, transport: TransportName = "tcp"
) -> AsyncIterator[tuple[FlippingPeer, common_pb2.Target]]:
    """The peer and how a placement names it."""
    agent = await open_agent(transport, "127.0.0.1")
    peer = FlippingPeer(agent, block_bytes)
    name = "tidemill.mesh.v1.TransferService"
    servicer = Servicer(transfer_pb2_grpc.add_TransferServiceServicer_to_server, peer, name)
    try:
        async with serve_grpc(ServiceSettings(instance="flipping"), [servicer]) as server:
            domain = common_pb2.DomainRef(instance="flipping", incarnation="i", epoch="e")
            yield peer, common_pb2.Target(domain=domain, endpoint=server.endpoint)
        await asyncio.sleep(0)
    finally:
        await agent.close()
