"""Frames on the socket between a worker service and a rank: 4-byte little-endian length, then a msgpack body."""

import asyncio
import struct

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The peer sent something that is not a frame."""


def pack_frame(body: bytes) -> bytes:
    """A body with its length in front."""
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next body; None at the end of the stream, also when the peer died within a frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
