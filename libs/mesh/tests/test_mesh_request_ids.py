"""A request's id goes with the calls that are made for it, into the log lines that they cause, and no further."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.contextvars import get_contextvars

from tidemill.v1 import errors_pb2
from tidemill_mesh import log, request_ids
from tidemill_mesh.channels import connect
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError
from tidemill_mesh.server import Servicer, serve_grpc

KINDS = ("unary", "stream")


class Failing:
    """Refuses every call, after it has noted whose it is."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def unary(self, _request: bytes, _context: Any) -> bytes:
        # What a call starts belongs to its request too.
        await asyncio.create_task(self._note())
        raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "not now")

    async def stream(self, request: bytes, context: Any) -> Any:
        yield b"first"
        yield await self.unary(request, context)

    async def _note(self) -> None:
        self.seen.append(get_contextvars().get("request_id", ""))

    def add(self, _servicer: Any, server: grpc.aio.Server) -> None:
        handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "stream": grpc.unary_stream_rpc_method_handler(self.stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Failing", handlers),))


async def call(channel: grpc.aio.Channel, kind: str) -> None:
    """One call, for the request that runs here."""
    path, metadata = f"/test.Failing/{kind}", request_ids.outgoing()
    if kind == "unary":
        answer = channel.unary_unary(path)(b"x", metadata=metadata)
    else:
        stream = channel.unary_stream(path)(b"x", metadata=metadata)
        assert await stream.read() == b"first"
        answer = stream.read()
    with pytest.raises(grpc.aio.AioRpcError):
        await answer


@pytest.mark.usefixtures("restored_logging")
async def test_a_call_is_logged_as_its_callers_request(
    mesh_settings: Callable[..., ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("json", "info", "kvstore", "kvstore-1")
    settings, servicer = mesh_settings(), Failing()
    async with serve_grpc(settings, [Servicer(servicer.add, servicer, "test.Failing")]) as server:
        channel = connect(server.endpoint, settings)
        for kind in KINDS:
            with request_ids.logged_as(f"r-{kind}"):
                await call(channel, kind)
            # The next one on the same connection is nobody's.
            await call(channel, kind)
        await channel.close()
    assert servicer.seen == ["r-unary", "", "r-stream", ""]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    failed = [line.get("request_id", "") for line in lines if line["event"] == "call failed"]
    assert failed == servicer.seen


@given(st.text(max_size=400))
def test_an_id_of_any_making_is_bounded_and_can_be_sent(request_id: str) -> None:
    with request_ids.logged_as(request_id):
        sent = dict(request_ids.outgoing())
    assert set(sent) == ({request_ids.METADATA_KEY} if request_id else set())
    for value in sent.values():
        assert len(value) == min(len(request_id), request_ids.MAX_CHARS)
        assert all("!" <= char <= "~" for char in value)
    assert request_ids.outgoing() == ()


def test_what_others_send_is_bounded_too() -> None:
    with request_ids.logged_as("before"):
        request_ids.take([("other", "x"), (request_ids.METADATA_KEY, "r 1\n" + "y" * 999)])
        assert get_contextvars()["request_id"] == ("r?1?" + "y" * 999)[: request_ids.MAX_CHARS]
    assert "request_id" not in get_contextvars()
