"""A gateway's side of Connect, as small as tests need it."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np

from tidemill.mesh.v1 import common_pb2, membership_pb2, worker_pb2, worker_pb2_grpc

WAIT_S = 300.0
"""Against hangs only."""


def pack_tokens(tokens: list[int]) -> bytes:
    """uint32 little endian."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def key(request_id: str, attempt: int = 0) -> worker_pb2.RequestKey:
    """A key of choice 0."""
    return worker_pb2.RequestKey(request_id=request_id, attempt=attempt)


class GatewayRig:
    """One connected gateway stream: sends messages, collects outputs and tickets by request."""

    def __init__(self, endpoint: str, name: str = "gateway-test") -> None:
        self.endpoint = endpoint
        self.channel = grpc.aio.insecure_channel(endpoint)
        self.stub: Any = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.welcome = worker_pb2.Welcome()
        self.outputs: dict[str, list[worker_pb2.Output]] = defaultdict(list)
        self.steps: list[worker_pb2.StepOutputs] = []
        self.tickets: dict[str, worker_pb2.Ticket] = {}
        self.missing: set[str] = set()
        self.ended: grpc.aio.AioRpcError | str | None = None
        self._name = name
        self._queue: asyncio.Queue[worker_pb2.ConnectRequest | None] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._pinger: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "GatewayRig":
        hello = worker_pb2.Hello(gateway=common_pb2.InstanceRef(instance=self._name, incarnation="i1"))
        self.send(hello=hello)
        self._task = asyncio.create_task(self._read())
        self._pinger = asyncio.create_task(self._ping())
        await self.until(lambda: bool(self.welcome.instance.instance))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._task, self._pinger):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.channel.close()

    def stop_pinging(self) -> None:
        """From now on the gateway is silent."""
        assert self._pinger is not None
        self._pinger.cancel()

    def send(self, **fields: Any) -> None:
        """Sends one ConnectRequest."""
        self._queue.put_nowait(worker_pb2.ConnectRequest(**fields))

    def submit(self, request_id: str, tokens: list[int], stage: str = "WHOLE", **more: Any) -> worker_pb2.Submit:
        """Submits a request with greedy sampling unless told otherwise."""
        attempt, max_tokens = more.pop("attempt", 0), more.pop("max_tokens", 8)
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 7}
        sampling |= more.pop("sampling", {})
        defaults = {
            "deadline_s": 600.0,
            "credit_tokens": 1 << 20,
            "prompt_tokens": len(tokens),
            "model_revision": self.welcome.model.revision,
        }
        submit = worker_pb2.Submit(
            key=key(request_id, attempt),
            token_ids=pack_tokens(tokens),
            sampling=worker_pb2.Sampling(**sampling),
            stage=worker_pb2.Submit.Stage.Value(f"STAGE_{stage}"),
            **(defaults | more),
        )
        self.send(submits=[submit])
        return submit

    async def finished(self, request_id: str) -> worker_pb2.Output:
        """The last output of a request's stage."""
        await self.until(lambda: any(output.finish for output in self.outputs[request_id]))
        return next(output for output in self.outputs[request_id] if output.finish)

    async def due(self, request_id: str) -> None:
        """Waits for hand_over_due."""
        await self.until(lambda: any(output.hand_over_due for output in self.outputs[request_id]))

    async def ticket(self, request_id: str, decode: "GatewayRig") -> worker_pb2.HandOverSource:
        """Asks for a ticket and returns what decode is told."""
        self.tickets.pop(request_id, None)
        self.send(hand_overs=[worker_pb2.HandOver(key=key(request_id), target=decode.target())])
        await self.until(lambda: request_id in self.tickets)
        return worker_pb2.HandOverSource(prefill=self.target(), ticket=self.tickets[request_id])

    def target(self, domain: int = 0) -> common_pb2.Target:
        """This worker as a placement target."""
        instance = self.welcome.instance
        ref = common_pb2.DomainRef(
            instance=instance.instance,
            incarnation=instance.incarnation,
            domain=domain,
            epoch=self.welcome.domains[domain].epoch,
        )
        return common_pb2.Target(domain=ref, endpoint=self.endpoint)

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request here, checked for gaps."""
        found: list[int] = []
        first: int | None = None
        for output in self.outputs[request_id]:
            if output.token_ids:
                first = output.first_position if first is None else first
                assert output.first_position == first + len(found), "positions join"
                found += output.token_ids
        return found

    async def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """The worker's status."""
        response: worker_pb2.GetWorkerStatusResponse = await self.stub.GetWorkerStatus(
            worker_pb2.GetWorkerStatusRequest()
        )
        return response

    async def until_idle(self) -> None:
        """Waits until all holds of the worker are zero."""
        holds: dict[str, int] = {}
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    holds = dict((await self.status()).holds)
                    if not any(holds.values()):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"holds are left: {holds}") from None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on what has arrived."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: condition() or self.ended is not None)
        assert condition(), f"the stream ended: {self.ended}"

    async def until_ended(self) -> None:
        """Waits for the stream's end."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.ended is not None)

    async def _requests(self) -> AsyncIterator[worker_pb2.ConnectRequest]:
        while (message := await self._queue.get()) is not None:
            yield message

    async def _ping(self) -> None:
        while True:
            self.send(ping=True)
            await asyncio.sleep(0.3)

    async def _read(self) -> None:
        ended: grpc.aio.AioRpcError | str = "by the worker"
        try:
            async for response in self.stub.Connect(self._requests()):
                await self._take(response)
        except grpc.aio.AioRpcError as error:
            ended = error
        async with self._changed:
            self.ended = ended
            self._changed.notify_all()

    async def _take(self, response: worker_pb2.ConnectResponse) -> None:
        async with self._changed:
            if response.HasField("welcome"):
                self.welcome = response.welcome
            if response.HasField("step"):
                self.steps.append(response.step)
                for output in response.step.outputs:
                    self.outputs[output.key.request_id].append(output)
            for offer in response.tickets:
                self.tickets[offer.key.request_id] = offer.ticket
            self.missing.update(key.request_id for key in response.missing)
            self._changed.notify_all()


async def read_card(rig: GatewayRig) -> membership_pb2.ModelCard:
    """Fetches the worker's ModelCard by its digest."""
    return membership_pb2.ModelCard.FromString(await read_asset(rig, rig.welcome.model.card_digest))


async def read_asset(rig: GatewayRig, digest: str) -> bytes:
    """Fetches an asset."""
    return b"".join([part.data async for part in rig.stub.GetAsset(worker_pb2.GetAssetRequest(digest=digest))])
