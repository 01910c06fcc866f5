"""/metrics, /health and /ready of a process, by the standard library's server in its own thread.

The answers come from the event loop under a deadline, so a stuck loop shows as 503 instead of as a false "healthy".
Nothing but three fixed paths is served: a web framework would be more code to keep than this page.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog

from tidemill_mesh.metrics import CONTENT_TYPE

SOCKET_TIMEOUT_S = 5.0
IDLE_S = 30.0
"""Between two looks of an idle thread whether it is to end: each look costs an idle process a wake-up."""
POKE_S = 0.05

log = structlog.get_logger()

# (status, content type, body)
Answer = tuple[int, str, bytes]


def text_answer(status: int, text: str) -> Answer:
    """A short plain answer."""
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


class StatusServer:
    """Serves the three paths until closed."""

    def __init__(
        self, host: str, port: int, loop_deadline_s: float, metrics: Callable[[], bytes], ready: Callable[[], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        paths: dict[str, Callable[[], Answer]] = {
            "/metrics": lambda: (200, CONTENT_TYPE, metrics()),
            "/health": lambda: text_answer(200, "ok"),
            "/ready": lambda: text_answer(200, "ready") if ready() else text_answer(503, "not ready"),
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = SOCKET_TIMEOUT_S

            def do_GET(self) -> None:
                self._reply(with_body=True)

            def do_HEAD(self) -> None:
                self._reply(with_body=False)

            def _reply(self, *, with_body: bool) -> None:
                make = paths.get(self.path.partition("?")[0], lambda: text_answer(404, "not found"))
                status, content_type, body = _on_loop(loop, make, loop_deadline_s)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Health checks are not worth a line each."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def server_bind(self) -> None:
                # HTTPServer's own would ask DNS for this host's name, which can take seconds.
                socketserver.TCPServer.server_bind(self)

            def handle_error(self, request: object, client_address: object) -> None:
                log.debug("status page request failed", peer=str(client_address), exc_info=True)

        self._server = Server((host.strip("[]"), port), Handler)
        self.port = int(self._server.server_address[1])
        self._host = "::1" if Server.address_family == socket.AF_INET6 else "127.0.0.1"
        if host.strip("[]") not in ("", "0.0.0.0", "::"):
            self._host = host.strip("[]")
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": IDLE_S}, name="http", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Stops serving."""
        await asyncio.to_thread(self._end)
        self._server.server_close()

    def _end(self) -> None:
        # The thread looks for the end only when it wakes.
        ending = threading.Thread(target=self._server.shutdown, name="end http")
        ending.start()
        while self._thread.is_alive():
            with contextlib.suppress(OSError):
                socket.create_connection((self._host, self.port), timeout=POKE_S).close()
            self._thread.join(POKE_S)
        ending.join()


def _on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Answer], deadline_s: float) -> Answer:
    async def answer() -> Answer:
        return make()

    future = asyncio.run_coroutine_threadsafe(answer(), loop)
    try:
        return future.result(deadline_s)
    except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
        future.cancel()
        return text_answer(503, "the event loop does not answer")
