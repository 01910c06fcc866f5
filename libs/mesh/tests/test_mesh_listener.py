"""A listener that closes: each connection that it took is handed over or closed, whatever the loop was about to do."""

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Callable
from typing import cast

import pytest
import uvloop

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.listener import Listener
from tidemill_mesh.streams.tls import server_tls

BOUND_S = 120.0
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Greeter(asyncio.Protocol):
    """Knows its transport while there is a connection."""

    def __init__(self, made: "list[Greeter]") -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()
        made.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(b"hello")

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.lost.set()


def bound() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def read_all(client: socket.socket) -> bytes:
    """What the other side said before it closed, or reset, the connection."""
    client.settimeout(BOUND_S)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(100):
            said += part
    return said


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_closing_in_any_turn_of_the_loop_leaves_no_connection_open(
    new_loop: Callable[[], asyncio.AbstractEventLoop], with_tls: bool, turns: int, certificates: dict[str, str]
) -> None:
    made: list[Greeter] = []

    async def close_soon(client: socket.socket) -> None:
        listening = bound()
        tls = server_tls(ServiceSettings(**certificates)) if with_tls else None
        listener = Listener(listening, lambda: Greeter(made), backlog=5, tls=tls)
        client.connect(listening.getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        await listener.close()
        for greeter in made:
            if greeter.transport is not None:
                greeter.transport.close()
                await greeter.lost.wait()

    gc.collect()
    with socket.socket() as client, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(close_soon(client))
        gc.collect()
        read_all(client)
    assert [str(warning.message) for warning in seen] == []
    assert all(greeter.transport is None for greeter in made)


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_connection_without_a_protocol_is_closed(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    tried: list[None] = []

    def refuse() -> asyncio.BaseProtocol:
        tried.append(None)
        raise RuntimeError("no protocol")

    async def connect(client: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        listening = bound()
        listener = Listener(listening, refuse, backlog=5)
        client.connect(listening.getsockname())
        while not tried:
            await asyncio.sleep(0)
        await listener.close()

    with socket.socket() as client:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(connect(client))
        assert read_all(client) == b""
