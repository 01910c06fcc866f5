"""The HTTP server inside a service that has its own signals, drain and logs."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable

from tidemill_gateway.bodies import Bodies
from tidemill_gateway.http.connection import App, Connection, Connections
from tidemill_mesh.listener import Listener
from tidemill_mesh.server import BindError
from tidemill_mesh.tasks import end, spawn

SILENCE_S = 75.0
"""A client that neither sends a request nor waits for an answer for so long is disconnected."""
SWEEP_S = 5.0
SLOW_CLIENT_S = 30.0
RECEIVE_TIMEOUT_S = 60.0
BODY_BYTES = 256 << 20
BACKLOG = 2048
END_S = 1.0
"""For answers that still run when the server ends; they were drained before."""


class ApiServer:
    """Where it listens, and how it ends."""

    def __init__(self, listener: Listener, port: int, connections: Connections) -> None:
        self.port = port
        self._listener = listener
        self._connections = connections

    async def end(self) -> None:
        """Closes idle connections and stops listening; running answers are the last of their connections."""
        await self._listener.close()
        for connection in list(self._connections.open):
            connection.end_when_idle()

    async def ended(self) -> None:
        """Waits a moment for running answers, then drops what is left."""
        await self.end()
        await self._wait_none()
        for connection in list(self._connections.open):
            connection.cut()
        # The next turns of the loop, which may be its last, take them down.
        await self._wait_none()

    async def _wait_none(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._connections.wait_none()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket whose accepted sockets send small writes at once; BindError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise BindError(f"cannot listen on {host}:{port}: {error}") from error
    return bound


@contextlib.asynccontextmanager
async def serve_http(
    app: App,
    host: str,
    port: int,
    tls_cert: str = "",
    tls_key: str = "",
    clock: Callable[[], float] = time.monotonic,
    *,
    slow_client_s: float = SLOW_CLIENT_S,
    on_slow_client: Callable[[], object] = lambda: None,
    bodies: Bodies | None = None,
    receive_timeout_s: float = RECEIVE_TIMEOUT_S,
) -> AsyncIterator[ApiServer]:
    """Serves the app until the block ends; with TLS when a certificate and its key are given.

    `on_slow_client` is called for each client that is cut off because it reads nothing of its answer. `bodies` is the
    room that request bodies share with those of other servers; a request has `receive_timeout_s` to arrive.
    """
    connections = Connections()
    shared = bodies or Bodies(BODY_BYTES)
    context = _tls(tls_cert, tls_key)
    bound = bind(host, port)
    listener = Listener(bound, lambda: Connection(app, connections, shared, clock), backlog=BACKLOG, tls=context)
    running = ApiServer(listener, int(bound.getsockname()[1]), connections)
    sweep = spawn(_sweep(connections, clock, slow_client_s, on_slow_client, receive_timeout_s), "quiet http clients")
    try:
        yield running
    finally:
        await end(sweep)
        await running.ended()


def _tls(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise BindError(f"cannot use the certificate {cert}: {error}") from error
    return context


async def _sweep(
    connections: Connections,
    clock: Callable[[], float],
    slow_client_s: float,
    on_slow_client: Callable[[], object],
    receive_timeout_s: float,
) -> None:
    """Ends connections of clients that do not read, say nothing, or never come to an end: one timer for all."""
    pause_s = min(SWEEP_S, slow_client_s / 4, receive_timeout_s / 4)
    while True:
        before = clock()
        await asyncio.sleep(pause_s)
        now = clock()
        if now - before > 2 * pause_s:
            # This process stood still: what it did not send or read meanwhile is no client's fault.
            continue
        quiet_before = now - SILENCE_S
        for connection in list(connections.open):
            if connection.does_not_read(now, slow_client_s):
                if connection.unread:
                    on_slow_client()
                connection.cut()
            elif not connection.busy and connection.quiet_since < quiet_before:
                connection.close()
            else:
                connection.refuse_slow(now, receive_timeout_s)
