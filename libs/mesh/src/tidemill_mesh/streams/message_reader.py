"""gRPC's messages in the bytes of a stream: a flag, a length of four bytes, the message."""

import struct

import grpc

from tidemill_mesh.streams.status import call_error

_PREFIX = struct.Struct(">BL")
PREFIX_BYTES = _PREFIX.size


def prefix(length: int) -> bytes:
    """What goes before a message that is not compressed."""
    return _PREFIX.pack(0, length)


class MessageReader:
    """Cuts what arrives into messages; AioRpcError for one that this side does not take."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = max_message_bytes
        self._partial = bytearray()
        self._wanted = PREFIX_BYTES
        """Bytes that `_partial` needs before it is worth looking at."""

    @property
    def in_message(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._partial)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes."""
        messages: list[bytes] = []
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return messages
            data = bytes(self._partial)
            self._partial.clear()
        at, end = 0, len(data)
        while end - at >= PREFIX_BYTES:
            flag, length = _PREFIX.unpack_from(data, at)
            if flag:
                raise call_error(grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not taken here")
            if length > self._max_bytes:
                text = f"Received message larger than max ({length} vs. {self._max_bytes})"
                raise call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            start = at + PREFIX_BYTES
            if start + length > end:
                self._wanted = PREFIX_BYTES + length
                break
            at = start + length
            messages.append(data[start:at])
        else:
            self._wanted = PREFIX_BYTES
        if at < end:
            self._partial += data[at:] if at else data
        return messages
