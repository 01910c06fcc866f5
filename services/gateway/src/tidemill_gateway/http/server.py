"""uvicorn inside a service that has its own signals, drain and logs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from tidemill_gateway.http.connection import ApiProtocol
from tidemill_mesh.server import BindError

KEEP_ALIVE_S = 75
BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service."""
        yield


class ApiServer:
    """The HTTP server: where it listens, and how it ends."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self.port = port
        self._server = server

    def end(self) -> None:
        """Closes idle connections and stops listening; running answers were drained before."""
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose accepted sockets send small writes at once; BindError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise BindError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


@contextlib.asynccontextmanager
async def serve_http(
    app: ASGIApp, host: str, port: int, tls_cert: str = "", tls_key: str = ""
) -> AsyncIterator[ApiServer]:
    """Serves the app until the block ends; with TLS when a certificate and its key are given."""
    listener = listen(host, port)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # starlette and uvicorn type one protocol in two ways
        http=ApiProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
        ssl_certfile=tls_cert or None,
        ssl_keyfile=tls_key or None,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="openai http")
    try:
        yield ApiServer(server, int(listener.getsockname()[1]))
    finally:
        server.should_exit = True
        await asyncio.wait([running])
        listener.close()
