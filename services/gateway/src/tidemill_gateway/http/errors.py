"""Errors in OpenAI's form, and what a client should do about them."""

import math
from collections.abc import Sequence

import orjson

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import HTTP_STATUS, MeshError, code_name

Header = tuple[bytes, bytes]

_CODES = {
    errors_pb2.ERROR_CODE_MODEL_NOT_FOUND: "model_not_found",
    errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG: "context_length_exceeded",
    errors_pb2.ERROR_CODE_UNAUTHENTICATED: "invalid_api_key",
    errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED: "rate_limit_exceeded",
    errors_pb2.ERROR_CODE_UNSUPPORTED: "unsupported_parameter",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# Clients retry 409, 429 and all 5xx unless told otherwise.
_RETRY = {
    errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED: b"true",
    errors_pb2.ERROR_CODE_UNAVAILABLE: b"true",
    errors_pb2.ERROR_CODE_WORKER_LOST: b"true",
    errors_pb2.ERROR_CODE_ALREADY_EXISTS: b"false",
    errors_pb2.ERROR_CODE_STALE: b"false",
    errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED: b"false",
    errors_pb2.ERROR_CODE_INTERNAL: b"false",
}


def error_body(error: MeshError) -> bytes:
    """{"error": {message, type, param, code}}; `limit` and `retry_after_s` beside them where there are any."""
    status = HTTP_STATUS[error.code]
    content: dict[str, object] = {
        "message": error.message,
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": error.field or None,
        "code": _CODES.get(error.code, code_name(error.code).lower()),
    }
    if error.limit:
        content["limit"] = error.limit
    if error.retry_after_s > 0:
        content["retry_after_s"] = error.retry_after_s
    return orjson.dumps({"error": content})


def error_headers(error: MeshError) -> Sequence[Header]:
    """Whether and when to try again."""
    headers: list[Header] = []
    if error.code in _RETRY:
        headers.append((b"x-should-retry", _RETRY[error.code]))
    if error.retry_after_s > 0:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(error.retry_after_s * 1000)).encode()))
    return headers
