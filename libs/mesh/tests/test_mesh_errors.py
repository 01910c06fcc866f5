"""The one error: its codes, its statuses and its way over the wire in every kind of call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from tidemill.v1 import errors_pb2
from tidemill_mesh.channels import MAX_MESSAGE_BYTES, connect
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import GRPC_STATUS, HTTP_STATUS, STATUS_DETAILS_KEY, MeshError, code_from_name, from_rpc_error
from tidemill_mesh.server import Servicer, serve_grpc

CODES = [code for code in errors_pb2.ErrorCode.values() if code != errors_pb2.ERROR_CODE_UNSPECIFIED]
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream", "written_stream"]


class Probe:
    """Offers every kind of call; each answers "first" where it streams, then does what the test wants."""

    def __init__(self) -> None:
        self.act: Callable[[], Any] = lambda: None

    async def _act(self) -> bytes:
        result = self.act()
        return (await result if asyncio.iscoroutine(result) else result) or b"done"

    async def unary_unary(self, _request: bytes, _context: Any) -> bytes:
        return await self._act()

    async def unary_stream(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self._act()

    async def stream_unary(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        async for _request in requests:
            return await self._act()
        raise AssertionError("no request")

    async def stream_stream(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for _request in requests:
            yield b"first"
            yield await self._act()

    async def written_stream(self, _request: bytes, context: Any) -> None:
        await context.write(b"first")
        await context.write(await self._act())

    def add(self, _servicer: Any, server: grpc.aio.Server) -> None:
        handlers = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
            "written_stream": grpc.unary_stream_rpc_method_handler(self.written_stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Probe", handlers),))


async def call(channel: grpc.aio.Channel, kind: str, request: bytes = b"x") -> list[bytes]:
    """All answers of one call."""
    path = f"/test.Probe/{kind}"

    async def requests() -> AsyncIterator[bytes]:
        yield request

    if kind == "unary_unary":
        return [await channel.unary_unary(path)(request)]
    if kind == "stream_unary":
        return [await channel.stream_unary(path)(requests())]
    if kind == "stream_stream":
        return [answer async for answer in channel.stream_stream(path)(requests())]
    return [answer async for answer in channel.unary_stream(path)(request)]


@pytest.fixture
async def probe(
    mesh_settings: Callable[..., ServiceSettings],
) -> AsyncIterator[tuple[Probe, grpc.aio.Channel]]:
    settings, servicer = mesh_settings(), Probe()
    async with serve_grpc(settings, [Servicer(servicer.add, servicer, "test.Probe")]) as server:
        channel = connect(server.endpoint, settings)
        yield servicer, channel
        await channel.close()


def raise_(error: BaseException) -> Any:
    raise error


async def failure(probe: tuple[Probe, grpc.aio.Channel], kind: str, act: Callable[[], Any]) -> grpc.aio.AioRpcError:
    probe[0].act = act
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async with asyncio.timeout(300):
            await call(probe[1], kind)
    return failed.value


def test_every_code_has_a_grpc_and_an_http_status() -> None:
    assert set(GRPC_STATUS) == set(CODES) == set(HTTP_STATUS)
    statuses = [400, 400, 404, 400, 401, 403, 409, 429, 503, 504, 499, 413, 502, 409, 404, 500]
    assert [HTTP_STATUS[code] for code in CODES] == statuses


@pytest.mark.parametrize("code", CODES)
def test_a_code_and_its_name_belong_together(code: errors_pb2.ErrorCode.ValueType) -> None:
    name = errors_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_")
    assert code_from_name(name) == code
    assert name in str(MeshError(code, "text"))


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="ERROR_CODE_NO_SUCH"):
        code_from_name("NO_SUCH")


def test_an_error_of_an_unknown_code_counts_as_internal() -> None:
    newer = errors_pb2.ErrorDetail(code=999, message="from the future")  # type: ignore[arg-type]
    assert MeshError.from_detail(newer).code == errors_pb2.ERROR_CODE_INTERNAL


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_arrives_whole_in_every_kind_of_call(probe: tuple[Probe, grpc.aio.Channel], kind: str) -> None:
    sent = MeshError(
        errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
        "the queue is full",
        field="tenant",
        limit="8 requests",
        retry_after_s=1.5,
    )
    failed = await failure(probe, kind, lambda: raise_(sent))
    assert failed.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.details() == "the queue is full"
    assert from_rpc_error(failed).to_detail() == sent.to_detail()


@pytest.mark.parametrize("code", CODES)
async def test_every_code_survives_the_wire(
    probe: tuple[Probe, grpc.aio.Channel], code: errors_pb2.ErrorCode.ValueType
) -> None:
    failed = await failure(probe, "unary_unary", lambda: raise_(MeshError(code, "text")))
    assert failed.code() == GRPC_STATUS[code]
    assert from_rpc_error(failed).code == code


async def test_the_details_are_standard_and_say_when_to_retry(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    error = MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "no worker", retry_after_s=2.5)
    failed = await failure(probe, "unary_unary", lambda: raise_(error))
    trailers = dict(failed.trailing_metadata() or ())
    status = status_pb2.Status.FromString(bytes(trailers[STATUS_DETAILS_KEY]))  # type: ignore[arg-type]
    retry = error_details_pb2.RetryInfo()
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_inner_task_still_gives_the_caller_a_status(
    probe: tuple[Probe, grpc.aio.Channel], kind: str
) -> None:
    async def lose_inner_task() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner

    failed = await failure(probe, kind, lose_inner_task)
    assert failed.code() == grpc.StatusCode.UNAVAILABLE
    assert from_rpc_error(failed).code == errors_pb2.ERROR_CODE_UNAVAILABLE


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_tells_the_caller_nothing_but_where_to_look(
    probe: tuple[Probe, grpc.aio.Channel], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = await failure(probe, kind, lambda: raise_(RuntimeError("password is hunter2")))
    assert failed.code() == grpc.StatusCode.INTERNAL
    assert "hunter2" not in str(failed.details())
    error_id = str(failed.details()).split()[-1]
    logged = capsys.readouterr()
    assert error_id in logged.out + logged.err
    assert "hunter2" in logged.out + logged.err


async def test_a_callers_cancellation_reaches_the_handler(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    probe[0].act = work
    # The call itself, as our clients do: a task that is cancelled while its call is prepared leaves the call running.
    running = probe[1].unary_stream("/test.Probe/unary_stream")(b"x")
    await started.wait()
    running.cancel()
    async with asyncio.timeout(300):
        await cancelled.wait()


async def test_a_failed_call_to_another_service_keeps_its_error(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    inner = MeshError(errors_pb2.ERROR_CODE_STALE, "an older incarnation", field="domain")
    downstream = await failure(probe, "unary_unary", lambda: raise_(inner))
    failed = await failure(probe, "unary_stream", lambda: raise_(downstream))
    assert from_rpc_error(failed).to_detail() == inner.to_detail()


async def test_a_handlers_own_abort_is_left_alone(
    mesh_settings: Callable[..., ServiceSettings],
) -> None:
    class Aborting(Probe):
        async def unary_unary(self, _request: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.DATA_LOSS, "mine", trailing_metadata=(("mark", "1"),))
            return b""

    settings, servicer = mesh_settings(), Aborting()
    async with serve_grpc(settings, [Servicer(servicer.add, servicer, "test.Probe")]) as server:
        channel = connect(server.endpoint, settings)
        failed = await failure((servicer, channel), "unary_unary", lambda: None)
        await channel.close()
    assert (failed.code(), failed.details()) == (grpc.StatusCode.DATA_LOSS, "mine")
    assert ("mark", "1") in [tuple(item) for item in failed.trailing_metadata() or ()]


async def test_a_message_over_the_limit_is_refused_with_the_limit(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(probe[1], "unary_unary", b"x" * (MAX_MESSAGE_BYTES + 1))
    error = from_rpc_error(failed.value)
    assert error.code == errors_pb2.ERROR_CODE_TOO_LARGE
    assert error.limit == f"{MAX_MESSAGE_BYTES} bytes"


async def test_an_answer_over_the_limit_is_refused_with_the_limit(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    failed = await failure(probe, "unary_unary", lambda: b"x" * (MAX_MESSAGE_BYTES + 1))
    assert from_rpc_error(failed).code == errors_pb2.ERROR_CODE_TOO_LARGE


async def test_messages_far_over_grpcs_default_limit_pass(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    probe[0].act = lambda: b"y" * (8 * 1024 * 1024)
    [answer] = await call(probe[1], "unary_unary", b"x" * (8 * 1024 * 1024))
    assert len(answer) == 8 * 1024 * 1024


async def test_a_very_long_message_is_cut_not_lost(probe: tuple[Probe, grpc.aio.Channel]) -> None:
    error = MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "é" * 20_000, field="f" * 20_000)
    failed = await failure(probe, "unary_unary", lambda: raise_(error))
    assert from_rpc_error(failed).code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT


async def test_a_peer_that_is_not_there_is_unavailable(
    mesh_settings: Callable[..., ServiceSettings], dead_address: str
) -> None:
    channel = connect(dead_address, mesh_settings())
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, "unary_unary")
    assert from_rpc_error(failed.value).code == errors_pb2.ERROR_CODE_UNAVAILABLE
    await channel.close()
