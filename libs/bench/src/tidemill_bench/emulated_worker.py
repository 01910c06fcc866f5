"""An *emulated* prefill or decode worker: speaks the worker contract, computes nothing, answers with canned tokens.

It measures what stands in front of workers. Prefill answers at once; decode gives every live request one token each
`step_s`, all in one message, as an engine step does. No KV moves: the ticket is made and never used.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from tidemill.mesh.v1 import common_pb2 as common
from tidemill.mesh.v1 import membership_pb2 as membership
from tidemill.mesh.v1 import worker_pb2 as worker
from tidemill.mesh.v1 import worker_pb2_grpc
from tidemill_bench.emulated_model import emulated_card
from tidemill_mesh.config import ServiceSettings, load_settings, setting
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_mesh.service import ServiceContext, run_service

TOKEN_ID = 65


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkerSettings(ServiceSettings):
    """What the emulated worker can be told."""

    role: str = setting("decode", choices=("prefill", "decode"))
    """Stage that it stands for."""
    step_s: float = setting(0.01, minimum=0.0, maximum=10.0)
    """Seconds between two steps of decode."""
    tokenizer: str = ""
    """Path of a tokenizer.json."""


@dataclass
class Live:
    """A decode request in flight."""

    key: worker.RequestKey
    position: int
    remaining: int


@dataclass
class GatewayStream:
    """One gateway's requests and what is to be sent to it."""

    outbox: asyncio.Queue[worker.ConnectResponse] = field(default_factory=asyncio.Queue)
    live: dict[tuple[str, int, int], Live] = field(default_factory=dict)


def _identity(key: worker.RequestKey) -> tuple[str, int, int]:
    return key.request_id, key.choice, key.attempt


class EmulatedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves Connect and GetAsset."""

    def __init__(self, record: membership.MembershipRecord, assets: dict[str, bytes], step_s: float) -> None:
        self._record, self._assets, self._step_s = record, assets, step_s

    async def GetAsset(  # noqa: N802
        self, request: worker.GetAssetRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker.GetAssetResponse]:
        """Sends an asset in one message."""
        yield worker.GetAssetResponse(data=self._assets[request.digest])

    async def Connect(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker.ConnectRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[worker.ConnectResponse]:
        """Answers submits with canned tokens."""
        stream = GatewayStream()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(stream, request_iterator))
            stepper = tasks.create_task(self._step(stream))
            try:
                while not reader.done():
                    yield await stream.outbox.get()
            finally:
                reader.cancel()
                stepper.cancel()

    async def _read(self, stream: GatewayStream, requests: AsyncIterator[worker.ConnectRequest]) -> None:
        async for request in requests:
            if request.HasField("hello"):
                welcome = worker.Welcome(
                    instance=common.InstanceRef(instance=self._record.instance, incarnation=self._record.incarnation),
                    domains=self._record.domains,
                    model=self._record.models[0],
                    liveness_s=3.0,
                )
                stream.outbox.put_nowait(worker.ConnectResponse(welcome=welcome))
            if request.ping:
                stream.outbox.put_nowait(worker.ConnectResponse(pong=True))
            for submit in request.submits:
                self._submit(stream, submit)
            for hand_over in request.hand_overs:
                ticket = worker.Ticket(secret=secrets.token_bytes(16), decode=hand_over.target.domain, deadline_s=30.0)
                offer = worker.TicketOffer(key=hand_over.key, ticket=ticket)
                stream.outbox.put_nowait(worker.ConnectResponse(tickets=[offer]))
            for key in request.aborts:
                stream.live.pop(_identity(key), None)
        stream.outbox.put_nowait(worker.ConnectResponse())

    def _submit(self, stream: GatewayStream, submit: worker.Submit) -> None:
        emitted = len(submit.token_ids) // 4 - submit.prompt_tokens
        limit = submit.sampling.max_tokens
        if submit.stage == worker.Submit.STAGE_PREFILL:
            output = worker.Output(
                key=submit.key,
                first_position=emitted,
                token_ids=[TOKEN_ID],
                hand_over_due=limit > emitted + 1,
                cached=common.TierTokens(),
                finish=worker.FINISH_PREFILLED if limit > emitted + 1 else worker.FINISH_LENGTH,
            )
            step = worker.StepOutputs(outputs=[output])
            stream.outbox.put_nowait(worker.ConnectResponse(step=step))
            return
        position = max(emitted, 1) if submit.stage == worker.Submit.STAGE_DECODE else emitted
        stream.live[_identity(submit.key)] = Live(submit.key, position, limit - position)

    async def _step(self, stream: GatewayStream) -> None:
        step = 0
        while True:
            await asyncio.sleep(self._step_s)
            if not stream.live:
                continue
            step += 1
            outputs = [self._advance(live) for live in stream.live.values()]
            stream.live = {name: live for name, live in stream.live.items() if live.remaining}
            stream.outbox.put_nowait(worker.ConnectResponse(step=worker.StepOutputs(step=step, outputs=outputs)))

    def _advance(self, live: Live) -> worker.Output:
        output = worker.Output(key=live.key, first_position=live.position, token_ids=[TOKEN_ID])
        live.position += 1
        live.remaining -= 1
        if not live.remaining:
            output.finish = worker.FINISH_LENGTH
        return output


async def _serve(context: ServiceContext) -> None:
    settings = context.settings
    assert isinstance(settings, EmulatedWorkerSettings)
    _, assets, model = emulated_card(settings.tokenizer)
    role = membership.ROLE_PREFILL if settings.role == "prefill" else membership.ROLE_DECODE
    record = membership.MembershipRecord(
        instance=context.instance,
        role=role,
        version="emulated",
        domains=[membership.DomainRecord(domain=0, epoch="emulated", tp_size=1, num_blocks=1 << 20)],
        models=[model],
        rpcs=["tidemill.mesh.v1.WorkerService/Connect", "tidemill.mesh.v1.WorkerService/GetAsset"],
    )
    # The RPCs that it lacks answer UNIMPLEMENTED, and its record does not list them.
    servicer = EmulatedWorker(record, assets, settings.step_s)  # type: ignore[abstract]
    item = Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "tidemill.mesh.v1.WorkerService")
    async with serve_grpc(settings, [item]) as server:
        record.endpoint = server.endpoint
        registration = await context.membership.register(record)
        record.incarnation = registration.incarnation
        server.set_serving(True)
        await context.publish_run_file(server.endpoint, "")
        await context.drain.requested.wait()


def main() -> int:
    """Runs until it is told to stop."""
    settings = load_settings(EmulatedWorkerSettings, "emulated_worker")
    return run_service("emulated_worker", settings, _serve)


if __name__ == "__main__":
    sys.exit(main())
