"""The body of one request as it comes: within a limit of its own, and within the room that all bodies share."""

from tidemill_gateway.bodies import Bodies, too_large
from tidemill_mesh.errors import MeshError

PART_BYTES = 64
"""What a part takes beside its bytes: a body in parts of one byte must not take a hundred times its size unseen."""


class Body:
    """Keeps parts while there is room; once there was none, drops them and remembers why."""

    __slots__ = ("_bodies", "_parts", "_refusal", "held_bytes", "limit_bytes", "size_bytes")

    def __init__(self, bodies: Bodies, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        """Of all that came, kept or not."""
        self._bodies = bodies
        self.held_bytes = 0
        """What it takes of the shared room."""
        self._parts: list[bytes] = []
        self._refusal: MeshError | None = None

    def expect(self, size_bytes: int) -> bool:
        """Whether a body of this size may come; if not, `whole` says why."""
        if size_bytes > self.limit_bytes:
            self._refusal = too_large(self.limit_bytes)
        elif not self._bodies.has_room(size_bytes):
            self._refusal = self._bodies.no_room()
        return self._refusal is None

    def add(self, part: bytes) -> None:
        """The next part."""
        self.size_bytes += len(part)
        if self._refusal is not None:
            return
        if self.size_bytes > self.limit_bytes:
            self._refuse(too_large(self.limit_bytes))
        elif self._bodies.take(len(part) + PART_BYTES):
            self.held_bytes += len(part) + PART_BYTES
            self._parts.append(part)
        else:
            self._refuse(self._bodies.no_room())

    def whole(self, limit_bytes: int) -> bytes:
        """All of it; TOO_LARGE beyond the limit, RESOURCE_EXHAUSTED where there was no room."""
        if self.size_bytes > limit_bytes:
            raise too_large(limit_bytes)
        if self._refusal is not None:
            raise self._refusal
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def drop(self) -> None:
        """Gives the room back; on every way out, as often as wanted."""
        self._parts.clear()
        self._bodies.give(self.held_bytes)
        self.held_bytes = 0

    def _refuse(self, error: MeshError) -> None:
        self.drop()
        self._refusal = error
