"""Gateways connected to this worker: each has one stream and an outbox that never blocks a step."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError


class GatewaySession:
    """One gateway's stream. Credits bound what its requests may produce; the outbox has a bound beside."""

    def __init__(self, gateway: common_pb2.InstanceRef, max_messages: int) -> None:
        self.gateway = gateway
        self.closed = False
        self._failure: MeshError | None = None
        self._max_messages = max_messages
        self._outbox: deque[worker_pb2.ConnectResponse] = deque()
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()

    def push(self, message: worker_pb2.ConnectResponse) -> None:
        """Queues a message; a gateway that lets the outbox overflow is cut off."""
        if self.closed:
            return
        if len(self._outbox) >= self._max_messages:
            self._outbox.clear()
            self.close(
                MeshError(
                    errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
                    "the gateway does not read its stream",
                    limit=f"{self._max_messages} messages",
                )
            )
            return
        self._outbox.append(message)
        self._empty.clear()
        self._changed.set()

    def push_output(self, output: worker_pb2.Output, domain: int) -> None:
        """Queues an output that no engine step made."""
        self.push(worker_pb2.ConnectResponse(step=worker_pb2.StepOutputs(domain=domain, outputs=[output])))

    def close(self, failure: MeshError | None = None) -> None:
        """Ends the stream after what is queued; only the first call counts."""
        if not self.closed:
            self.closed = True
            self._failure = failure
            self._changed.set()

    async def flushed(self) -> None:
        """Waits until all that was queued has gone to gRPC, or the stream has ended."""
        await self._empty.wait()

    @property
    def num_queued(self) -> int:
        """Messages not yet handed to gRPC."""
        return len(self._outbox)

    async def messages(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """What to send, until the session is closed; raises the failure it was closed with."""
        while True:
            while self._outbox:
                yield self._outbox.popleft()
            self._empty.set()
            if self.closed:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
