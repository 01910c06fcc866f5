"""How a call ends, as gRPC's trailers spell it and as grpc.aio's error holds it."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote

import grpc
from grpc.aio import AioRpcError, Metadata

Header = tuple[str, str]

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
HTTP_CODES = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
"""What an answer means that something between, which does not speak gRPC, has given."""


def call_error(code: grpc.StatusCode, details: str, trailers: Iterable[tuple[str, str | bytes]] = ()) -> AioRpcError:
    """The error of a call that has ended."""
    return AioRpcError(code, Metadata(), Metadata(*trailers), details=details)


def from_trailers(headers: Sequence[Header]) -> AioRpcError | None:
    """How a call ended by its trailers; None: well."""
    code, text = grpc.StatusCode.UNKNOWN, "the call ended without a status"
    trailers: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name == "grpc-status":
            code = _CODES.get(int(value) if value.isdecimal() else -1, grpc.StatusCode.UNKNOWN)
            text = ""
        elif name.endswith("-bin"):
            trailers.append((name, _binary(value)))
        elif not name.startswith((":", "grpc-")):
            trailers.append((name, value))
    text = next((unquote(value) for name, value in headers if name == "grpc-message"), text)
    return None if code is grpc.StatusCode.OK else call_error(code, text, trailers)


def to_trailers(error: AioRpcError | None) -> list[Header]:
    """The trailers that say how a call ended."""
    if error is None:
        return [("grpc-status", "0")]
    headers = [("grpc-status", str(error.code().value[0])), ("grpc-message", quote(error.details() or "", _PRINTABLE))]
    for name, value in error.trailing_metadata() or ():
        if isinstance(value, bytes):
            headers.append((name, base64.b64encode(value).decode().rstrip("=")))
        else:
            headers.append((name, value))
    return headers


def _binary(value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4))
    except binascii.Error:
        return b""
