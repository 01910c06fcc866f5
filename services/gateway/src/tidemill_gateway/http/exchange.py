"""One HTTP request and its answer."""

import http
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urlsplit

from tidemill.v1 import errors_pb2
from tidemill_gateway.http.body import Body
from tidemill_gateway.http.errors import Header, error_body, error_headers
from tidemill_mesh.errors import HTTP_STATUS, MeshError

if TYPE_CHECKING:
    from tidemill_gateway.http.connection import Connection

JSON_TYPE = b"application/json"


@cache
def status_line(status: int) -> bytes:
    """The first line of an answer."""
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Client Closed Request" if status == 499 else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


class Exchange:
    """What was asked, and the answer with its request id. Writes return at once; `Connection.writable` says when to
    stop."""

    __slots__ = (
        "_chunked",
        "_head",
        "_http_1_1",
        "_target",
        "body",
        "complete",
        "connection",
        "headers",
        "keep_alive",
        "method",
        "request_id",
        "started",
    )

    def __init__(
        self,
        connection: "Connection",
        *,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        http_1_1: bool,
        keep_alive: bool,
        body: Body,
    ) -> None:
        self.connection = connection
        self.method = method
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = body
        self.request_id = ""
        self.started = False
        self.complete = False
        self._target = target
        self._http_1_1 = http_1_1
        self._head = b""
        self._chunked = False

    @property
    def path(self) -> str:
        """Path without query, decoded."""
        target = self._target
        if not target.startswith(b"/"):
            try:
                target = urlsplit(target).path
            except ValueError:
                return ""
        path = target.partition(b"?")[0]
        return (unquote_to_bytes(path) if b"%" in path else path).decode("utf-8", "replace")

    def header(self, name: bytes) -> str:
        """A request header as text; empty when absent."""
        return self.headers.get(name, b"").decode("latin-1")

    def start(
        self, status: int, content_type: bytes, headers: Sequence[Header] = (), *, length: int | None = None
    ) -> None:
        """Status and headers, sent with the first bytes of the body; a body of unknown length is sent in chunks."""
        lines = [status_line(status), b"content-type: ", content_type]
        if self.request_id:
            lines += (b"\r\nx-request-id: ", self.request_id.encode())
        for name, value in headers:
            lines += (b"\r\n", name, b": ", value)
        if length is not None:
            lines.append(b"\r\ncontent-length: %d" % length)
        elif self._http_1_1:
            self._chunked = True
            lines.append(b"\r\ntransfer-encoding: chunked")
        else:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"\r\nconnection: close")
        elif not self._http_1_1:
            lines.append(b"\r\nconnection: keep-alive")
        lines.append(b"\r\n\r\n")
        self.started = True
        self._head = b"".join(lines)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a part of the body."""
        head, self._head = self._head, b""
        self.complete = last
        if self.method == "HEAD":
            data = b""
        elif self._chunked:
            # An empty chunk would be the end.
            chunk = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
            data = chunk + b"0\r\n\r\n" if last else chunk
        self.connection.write(head + data if head else data)

    def reply(self, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: Sequence[Header] = ()) -> None:
        """Sends a whole answer."""
        self.start(status, content_type, headers, length=len(body))
        self.write(body, last=True)

    def fail(self, error: MeshError) -> None:
        """Sends an error, as the answer or, once that has begun, as its last event."""
        if self.complete:
            return
        if error.code == errors_pb2.ERROR_CODE_TOO_LARGE:
            self.keep_alive = False
        if self.started:
            self.write(b"data: " + error_body(error) + b"\n\n", last=True)
        else:
            self.reply(HTTP_STATUS[error.code], error_body(error), headers=error_headers(error))
