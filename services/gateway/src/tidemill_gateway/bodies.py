"""One bound on the bytes of request bodies in flight, over all clients and both APIs.

A limit for each body says nothing about their sum: many clients that each send one just below it, slowly, would fill
the memory. A body counts from its first bytes until its request is parsed and accepted, or refused.
"""

from collections.abc import Callable

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError

RETRY_S = 1.0
NO_ROOM, TOO_SLOW = "no_room", "too_slow"


class Bodies:
    """What the bodies in flight take, and who is refused for it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.on_refused: Callable[[str], object] = lambda reason: None

    def take(self, num_bytes: int) -> bool:
        """Counts bytes that arrived, if there is room for them."""
        if not self.has_room(num_bytes):
            return False
        self.held_bytes += num_bytes
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may come."""
        return self.held_bytes + num_bytes <= self.limit_bytes

    def give(self, num_bytes: int) -> None:
        """Counts bytes no more."""
        assert num_bytes <= self.held_bytes, "bytes are given back that nobody took"
        self.held_bytes -= num_bytes

    def too_slow(self, limit_s: float) -> MeshError:
        """DEADLINE_EXCEEDED for a request that did not arrive in time, counted."""
        self.on_refused(TOO_SLOW)
        text = "the request took too long to arrive"
        return MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, text, field="body", limit=f"{limit_s:g} s")

    def no_room(self) -> MeshError:
        """RESOURCE_EXHAUSTED for a body that finds no room, counted."""
        self.on_refused(NO_ROOM)
        return MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
            "too many bytes of request bodies are in flight on this gateway",
            field="body",
            limit=f"{self.limit_bytes} bytes",
            retry_after_s=RETRY_S,
        )


def too_large(limit_bytes: int) -> MeshError:
    """TOO_LARGE with the limit."""
    text = "the request body is too large"
    return MeshError(errors_pb2.ERROR_CODE_TOO_LARGE, text, field="body", limit=f"{limit_bytes} bytes")
