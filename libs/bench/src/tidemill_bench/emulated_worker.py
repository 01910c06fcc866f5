"""An *emulated* prefill or decode worker: speaks the worker contract, computes nothing, answers with canned tokens.

It measures what stands in front of workers. Prefill answers at once; decode gives every live request one token each
`step_s`, all in one message, as an engine step does. No KV moves: the ticket is made and never used.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from tidemill.mesh.v1 import common_pb2 as common
from tidemill.mesh.v1 import membership_pb2 as membership
from tidemill.mesh.v1 import worker_pb2 as worker
from tidemill.mesh.v1 import worker_pb2_grpc
from tidemill_bench.emulated_model import emulated_card
from tidemill_mesh.config import ServiceSettings, load_settings, setting
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_mesh.streams.server import ServerStream

CONNECT_RPC = "tidemill.mesh.v1.WorkerService/Connect"
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


def _identity(key: worker.RequestKey) -> tuple[str, int, int]:
    return key.request_id, key.choice, key.attempt


class GatewayStream:
    """One gateway's requests; answers where the gateway's messages are read."""

    def __init__(self, stream: ServerStream, record: membership.MembershipRecord, step_s: float) -> None:
        self._stream = stream
        self._record = record
        self._step_s = step_s
        self._live: dict[tuple[str, int, int], Live] = {}

    def begin(self) -> None:
        """Takes the stream's messages until it ends."""
        self._stream.on_message = self._take
        stepper = asyncio.get_running_loop().create_task(self._step())
        self._stream.on_end = lambda error: stepper.cancel()

    def _take(self, data: bytes) -> None:
        request = worker.ConnectRequest.FromString(data)
        answer = worker.ConnectResponse(pong=request.ping)
        if request.HasField("hello"):
            answer.welcome.CopyFrom(self._welcome())
        for submit in request.submits:
            self._submit(submit, answer)
        for hand_over in request.hand_overs:
            ticket = worker.Ticket(secret=secrets.token_bytes(16), decode=hand_over.target.domain, deadline_s=30.0)
            answer.tickets.append(worker.TicketOffer(key=hand_over.key, ticket=ticket))
        for key in request.aborts:
            self._live.pop(_identity(key), None)
        if answer.ByteSize():
            self._stream.send(answer.SerializeToString())

    def _welcome(self) -> worker.Welcome:
        return worker.Welcome(
            instance=common.InstanceRef(instance=self._record.instance, incarnation=self._record.incarnation),
            domains=self._record.domains,
            model=self._record.models[0],
            liveness_s=3.0,
        )

    def _submit(self, submit: worker.Submit, answer: worker.ConnectResponse) -> None:
        emitted = len(submit.token_ids) // 4 - submit.prompt_tokens
        limit = submit.sampling.max_tokens
        if submit.stage == worker.Submit.STAGE_PREFILL:
            answer.step.outputs.add(
                key=submit.key,
                first_position=emitted,
                token_ids=[TOKEN_ID],
                hand_over_due=limit > emitted + 1,
                cached=common.TierTokens(),
                finish=worker.FINISH_PREFILLED if limit > emitted + 1 else worker.FINISH_LENGTH,
            )
            return
        position = max(emitted, 1) if submit.stage == worker.Submit.STAGE_DECODE else emitted
        self._live[_identity(submit.key)] = Live(submit.key, position, limit - position)

    async def _step(self) -> None:
        step = 0
        while True:
            await asyncio.sleep(self._step_s)
            if not self._live:
                continue
            step += 1
            outputs = [self._advance(live) for live in self._live.values()]
            self._live = {name: live for name, live in self._live.items() if live.remaining}
            message = worker.ConnectResponse(step=worker.StepOutputs(step=step, outputs=outputs))
            self._stream.send(message.SerializeToString())

    def _advance(self, live: Live) -> worker.Output:
        output = worker.Output(key=live.key, first_position=live.position, token_ids=[TOKEN_ID])
        live.position += 1
        live.remaining -= 1
        if not live.remaining:
            output.finish = worker.FINISH_LENGTH
        return output


class EmulatedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves GetAsset; Connect has a port of its own."""

    def __init__(self, assets: dict[str, bytes]) -> None:
        self._assets = assets

    async def GetAsset(  # noqa: N802
        self, request: worker.GetAssetRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker.GetAssetResponse]:
        """Sends an asset in one message."""
        yield worker.GetAssetResponse(data=self._assets[request.digest])


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
        rpcs=[CONNECT_RPC, "tidemill.mesh.v1.WorkerService/GetAsset"],
    )
    # The RPCs that it lacks answer UNIMPLEMENTED, and its record does not list them.
    servicer = EmulatedWorker(assets)  # type: ignore[abstract]
    streams = {CONNECT_RPC: lambda stream: GatewayStream(stream, record, settings.step_s).begin()}
    name = "tidemill.mesh.v1.WorkerService"
    item = Servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, name, streams)
    async with serve_grpc(settings, [item]) as server:
        record.endpoint, record.stream_endpoint = server.endpoint, server.stream_endpoint
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
