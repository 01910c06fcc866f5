"""gRPC requests in flight, behind a line that stops in the middle of one."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.proxy import Proxy

from tidemill.v1 import errors_pb2
from tidemill.v1 import inference_pb2 as pb
from tidemill.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from tidemill_gateway import inference_servicer
from tidemill_gateway.auth import Keys, load_keys
from tidemill_gateway.bodies import Bodies
from tidemill_gateway.bounded_reads import SMALL_MESSAGE_BYTES, BoundedReads, accepted
from tidemill_gateway.grpc_requests import to_spec
from tidemill_gateway.inference_servicer import FULL_NAME, InferenceServicer
from tidemill_gateway.spec import GenerationSpec
from tidemill_mesh.channels import MAX_MESSAGE_BYTES, client_options
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_mesh.server import Servicer, serve_grpc

BIG = "x" * 1_000_000
# Long enough for a busy machine to read a small message that is there.
SLOW_S = 0.6


class Line(Proxy):
    """Relays connections to a server; while it is stopped, only the first bytes that come on each."""

    def __init__(self, server: str, first_bytes: int) -> None:
        super().__init__(server)
        self.go_on = asyncio.Event()
        self._first_bytes = first_bytes

    async def forward_there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._first_bytes
        with contextlib.suppress(OSError):
            while left > 0 and (data := await reader.read(min(1 << 16, left))):
                left -= len(data)
                writer.write(data)
                await writer.drain()
        if left <= 0:
            await self.go_on.wait()
        await super().forward_there(reader, writer)


class Sizes(InferenceServiceServicer):
    """Answers with what the request held, once it may."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies, self.may, self.seen = bodies, asyncio.Event(), []
        self.may.set()
        self.channels: list[grpc.aio.Channel] = []

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        await self.may.wait()
        return pb.GetModelResponse(model=pb.Model(name=str(len(request.model))))

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        held = self.bodies.held_bytes
        accepted()
        self.seen.append((held, self.bodies.held_bytes))
        for _ in range(2):
            await context.write(pb.GenerateResponse(request_id=request.request_id))


@contextlib.asynccontextmanager
async def served(
    bodies: Bodies,
    lines: int = 1,
    timeout_s: float = 60.0,
    keys: Keys | None = None,
    servicer: InferenceServiceServicer | None = None,
) -> AsyncIterator[tuple[Sizes, list[InferenceServiceStub], list[Line]]]:
    """A server, and stubs of which the first goes to it directly and the others over lines that stop."""
    sizes = Sizes(bodies)
    reads = BoundedReads(bodies, keys or Keys(None), FULL_NAME, timeout_s, SLOW_S)
    settings = ServiceSettings(port=0)
    services = [Servicer(add_InferenceServiceServicer_to_server, servicer or sizes, FULL_NAME)]
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(300):
        server = await stack.enter_async_context(serve_grpc(settings, services, interceptors=[reads]))
        ports, made = [server.port], []
        for _ in range(lines):
            made.append(await stack.enter_async_context(Line(f"127.0.0.1:{server.port}", 100_000)))
            ports.append(made[-1].port)
        options = client_options(60.0)
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for port in ports]
        for channel in channels:
            stack.push_async_callback(channel.close)
        sizes.channels = channels
        yield sizes, [InferenceServiceStub(channel) for channel in channels], made
    assert bodies.held_bytes == 0


async def until_held(bodies: Bodies, num_bytes: int) -> None:
    while bodies.held_bytes < num_bytes:
        await asyncio.sleep(0.01)


async def refusal(call: Awaitable[object]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def test_a_message_that_stops_on_its_way_counts_as_the_largest_until_it_is_there():
    bodies = Bodies(4 * MAX_MESSAGE_BYTES)
    async with served(bodies) as (_, [direct, slow], [line]):
        call = slow.GetModel(pb.GetModelRequest(model=BIG))
        await until_held(bodies, MAX_MESSAGE_BYTES)
        assert (await direct.GetModel(pb.GetModelRequest(model="abc"))).model.name == "3"
        line.go_on.set()
        assert (await call).model.name == str(len(BIG))


async def test_messages_that_stop_have_half_of_the_room_and_others_the_rest():
    bodies, reasons = Bodies(2 * MAX_MESSAGE_BYTES), []
    bodies.on_refused = reasons.append
    async with served(bodies, lines=2) as (_, [direct, one, two], [line, _]):
        first = one.GetModel(pb.GetModelRequest(model=BIG))
        await until_held(bodies, MAX_MESSAGE_BYTES)
        error = await refusal(two.GetModel(pb.GetModelRequest(model=BIG)))
        assert error.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
        assert (error.field, error.limit) == ("body", f"{bodies.limit_bytes} bytes")
        assert error.retry_after_s > 0
        assert (await direct.GetModel(pb.GetModelRequest(model="abc"))).model.name == "3"
        line.go_on.set()
        assert (await first).model.name == str(len(BIG))
    assert reasons == ["no_room"]


async def test_a_message_that_never_arrives_is_given_up():
    bodies, reasons = Bodies(4 * MAX_MESSAGE_BYTES), []
    bodies.on_refused = reasons.append
    async with served(bodies, timeout_s=2 * SLOW_S) as (_, [direct, slow], _):
        error = await refusal(slow.GetModel(pb.GetModelRequest(model=BIG)))
        assert (error.code, error.field) == (errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "body")
        assert error.limit == f"{2 * SLOW_S:g} s"
        assert bodies.held_bytes == 0
        assert (await direct.GetModel(pb.GetModelRequest(model="abc"))).model.name == "3"
    assert reasons == ["too_slow"]


async def test_whole_messages_count_until_they_are_accepted_and_without_room_are_refused():
    bodies = Bodies(1_500_000)
    async with served(bodies, lines=0) as (servicer, [stub], _):
        servicer.may.clear()
        first = stub.GetModel(pb.GetModelRequest(model=BIG))
        await until_held(bodies, len(BIG))
        error = await refusal(stub.GetModel(pb.GetModelRequest(model=BIG)))
        assert error.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
        servicer.may.set()
        await first
        assert bodies.held_bytes == 0
        request = pb.GenerateRequest(request_id="r", text=BIG)
        assert [answer.request_id async for answer in stub.Generate(request)] == ["r", "r"]
        [(before, after)] = servicer.seen
        assert before > len(BIG)
        assert after == 0


async def test_a_client_that_leaves_in_mid_message_gives_its_room_back():
    bodies = Bodies(4 * MAX_MESSAGE_BYTES)
    async with served(bodies) as (_, [_, slow], [line]):
        call = slow.GetModel(pb.GetModelRequest(model=BIG))
        await until_held(bodies, MAX_MESSAGE_BYTES)
        call.cancel()
        line.go_on.set()
        while bodies.held_bytes:
            await asyncio.sleep(0.01)


async def test_health_checks_take_no_room_however_long_they_watch_or_large_they_come():
    bodies = Bodies(4 * MAX_MESSAGE_BYTES)
    async with served(bodies, lines=0) as (servicer, _, _):
        stub = health_pb2_grpc.HealthStub(servicer.channels[0])
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=FULL_NAME))
        await watch.read()
        assert bodies.held_bytes == 0
        for call in (stub.Check, lambda request: stub.Watch(request).read()):
            error = await refusal(call(health_pb2.HealthCheckRequest(service=BIG)))
            assert (error.code, error.field) == (errors_pb2.ERROR_CODE_TOO_LARGE, "body")
            assert error.limit == f"{SMALL_MESSAGE_BYTES} bytes"
        watch.cancel()


async def test_a_health_check_that_stops_on_its_way_takes_no_room_and_is_given_up_soon():
    bodies, reasons = Bodies(4 * MAX_MESSAGE_BYTES), []
    bodies.on_refused = lambda reason: reasons.append((reason, bodies.held_bytes))
    async with served(bodies) as (servicer, _, _):
        stub = health_pb2_grpc.HealthStub(servicer.channels[1])
        error = await refusal(stub.Check(health_pb2.HealthCheckRequest(service=BIG)))
        assert (error.code, error.limit) == (errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, f"{SLOW_S:g} s")
    assert reasons == [("too_slow", 0)]


async def test_nothing_is_read_for_a_caller_without_a_key(tmp_path):
    (tmp_path / "keys").write_text("right tenant\n")
    bodies = Bodies(4 * MAX_MESSAGE_BYTES)
    async with served(bodies, lines=2, keys=load_keys(str(tmp_path / "keys"))) as (_, [direct, *slow], _):
        request = pb.GetModelRequest(model=BIG)
        for stub, metadata in zip(slow, ((), (("authorization", "Bearer wrong"),)), strict=True):
            # The message never arrives: were it awaited, the call would end otherwise.
            error = await refusal(stub.GetModel(request, metadata=metadata))
            assert error.code == errors_pb2.ERROR_CODE_UNAUTHENTICATED
        answer = await direct.GetModel(request, metadata=(("authorization", "Bearer right"),))
        assert answer.model.name == str(len(BIG))


class Runs:
    """A gateway whose requests run no longer than it takes to see who still has their messages."""

    def __init__(self) -> None:
        self.messages: list[pb.GenerateRequest] = []
        self.references: list[int] = []
        self.tenants: list[str] = []

    def to_spec(self, request: pb.GenerateRequest, traceparent: str) -> GenerationSpec:
        self.messages.append(request)
        return to_spec(request, traceparent)

    @contextlib.asynccontextmanager
    async def run(self, spec: GenerationSpec, tenant: str, **_: object) -> AsyncIterator["Runs"]:
        self.references += [sys.getrefcount(message) for message in self.messages]
        self.tenants.append(tenant)
        yield self

    async def outputs(self) -> AsyncIterator[None]:
        for nothing in ():
            yield nothing


async def test_nothing_keeps_the_message_of_a_request_that_runs(monkeypatch):
    runs, bodies = Runs(), Bodies(1 << 20)
    monkeypatch.setattr(inference_servicer, "to_spec", runs.to_spec)
    servicer = InferenceServicer(runs)  # type: ignore[arg-type]
    async with served(bodies, lines=0, servicer=servicer) as (_, [stub], _):
        assert [answer async for answer in stub.Generate(pb.GenerateRequest(text="x"))] == []
    # The list, the loop over it and the argument; none of a frame that waits for the end.
    assert runs.references == [3]


async def test_a_key_is_asked_for_once_in_each_call_and_by_every_method(tmp_path):
    (tmp_path / "keys").write_text("key-a acme\nkey-b beta\n")
    keys, runs = load_keys(str(tmp_path / "keys")), Runs()
    asked, tenant_of = [], keys.tenant
    keys.tenant = lambda header: asked.append(header) or tenant_of(header)  # type: ignore[method-assign]
    servicer = InferenceServicer(runs)  # type: ignore[arg-type]
    async with served(Bodies(1 << 20), lines=0, keys=keys, servicer=servicer) as (_, [stub], _):
        for key in ("key-a", "key-b", "key-a"):
            metadata = (("authorization", f"Bearer {key}"),)
            assert [answer async for answer in stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)] == []
        assert runs.tenants == ["acme", "beta", "acme"]
        assert asked == ["Bearer key-a", "Bearer key-b", "Bearer key-a"]
        calls = (
            stub.Generate(pb.GenerateRequest(text="x")).read(),
            stub.GetModel(pb.GetModelRequest()),
            stub.ListModels(pb.ListModelsRequest()),
            stub.Tokenize(pb.TokenizeRequest(text="x")),
        )
        for call in calls:
            assert (await refusal(call)).code == errors_pb2.ERROR_CODE_UNAUTHENTICATED
