"""Whose request a call is made for: the id goes beside the call, as metadata, and into log lines that the call causes.

Contracts between services that know no requests, as kvstore's, stay as they are.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from structlog.contextvars import bind_contextvars, bound_contextvars, get_contextvars

METADATA_KEY = "tidemill-request-id"
MAX_CHARS = 160
"""A client's id has at most 128 characters; gateways append a few."""
_FIELD = "request_id"


def logged_as(request_id: str) -> AbstractContextManager[None]:
    """Within the block, log lines and calls that carry `outgoing()` are of this request; so are tasks begun there."""
    return bound_contextvars(**{_FIELD: request_id})


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for a call that is made now: the id of the request that runs here, nothing where there is none."""
    request_id = _bounded(str(get_contextvars().get(_FIELD, "")))
    return ((METADATA_KEY, request_id),) if request_id else ()


def take(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """The running call logs under the id that its caller sent, if any; the context must be this call's own."""
    for key, value in metadata:
        if key == METADATA_KEY and isinstance(value, str) and value:
            bind_contextvars(**{_FIELD: _bounded(value)})


def _bounded(request_id: str) -> str:
    """What gRPC carries and a log line can hold, whoever made it up."""
    return "".join(char if "!" <= char <= "~" else "?" for char in request_id[:MAX_CHARS])
