"""One HTTP request and its answer."""

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from tidemill.v1 import errors_pb2
from tidemill_gateway.http.connection import SCOPE_KEY, Connection
from tidemill_gateway.http.errors import Header, error_body, error_headers
from tidemill_mesh.errors import HTTP_STATUS, MeshError

JSON_TYPE = b"application/json"
MAX_DISCARDED_BYTES = 64 << 20
"""Of a body that is too large, read and dropped so that the client gets to see the answer."""


class ClientGone(Exception):
    """Nobody is left to answer."""


class Exchange:
    """Reads the body within its limit, sends the answer with its request id."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, closing: bool) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.connection: Connection = scope[SCOPE_KEY]
        self.client_host: str = scope["client"][0] if scope.get("client") else ""
        self.request_id = ""
        self.started = False
        self._receive = receive
        self._send = send
        self._closing = closing

    def header(self, name: bytes) -> str:
        """A request header as text; empty when absent."""
        return self.headers.get(name, b"").decode("latin-1")

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body; TOO_LARGE beyond the limit."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size <= limit_bytes:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body", False) or size > limit_bytes + MAX_DISCARDED_BYTES:
                break
        if size > limit_bytes:
            self._closing = True
            raise MeshError(
                errors_pb2.ERROR_CODE_TOO_LARGE, "the request body is too large", limit=f"{limit_bytes} bytes"
            )
        return b"".join(parts)

    async def start(self, status: int, content_type: bytes, headers: Sequence[Header] = ()) -> None:
        """Sends status and headers; the body follows by `write`."""
        shown: list[Header] = [(b"content-type", content_type)]
        if self.request_id:
            shown.append((b"x-request-id", self.request_id.encode()))
        if self._closing:
            shown.append((b"connection", b"close"))
        shown.extend(headers)
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": shown})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a part of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def reply(
        self, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: Sequence[Header] = ()
    ) -> None:
        """Sends a whole answer."""
        await self.start(status, content_type, [(b"content-length", str(len(body)).encode()), *headers])
        await self.write(body, last=True)

    async def fail(self, error: MeshError) -> None:
        """Sends an error, as the answer or, once that has begun, as its last event."""
        if self.started:
            await self.write(b"data: " + error_body(error) + b"\n\n", last=True)
        else:
            await self.reply(HTTP_STATUS[error.code], error_body(error), headers=error_headers(error))
