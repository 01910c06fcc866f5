"""HTTP/2 frames (RFC 9113) as far as gRPC needs them: made and taken apart, without state."""

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
FRAME_BYTES = 16384
"""Largest payload that either side may send unless the other allows more."""
FIRST_WINDOW = 65535
"""Bytes that may be sent before the other side has said anything."""
MAX_WINDOW = (1 << 31) - 1
MIN_MAX_FRAME, MAX_MAX_FRAME = 1 << 14, (1 << 24) - 1
"""What a side may say of MAX_FRAME_SIZE (RFC 9113, section 6.5.2)."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

_HEAD = struct.Struct(">BHBBL")
_SETTING = struct.Struct(">HL")
_NUMBER = struct.Struct(">L")
_GOAWAY = struct.Struct(">LL")


class ProtocolError(Exception):
    """The other side breaks HTTP/2's rules: the connection ends with this code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as it travels."""
    return head(kind, flags, stream_id, len(payload)) + payload


def head(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """The first nine bytes of a frame."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


def parse_head(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Payload length, kind, flags and stream of the frame that begins at `at`."""
    high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
    return high << 16 | low, kind, flags, stream_id & MAX_WINDOW


def settings(values: Mapping[int, int]) -> bytes:
    """What this side allows the other."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def parse_settings(payload: bytes) -> dict[int, int]:
    """Settings by number."""
    if len(payload) % _SETTING.size:
        raise ProtocolError(FRAME_SIZE_ERROR, "a SETTINGS frame of odd size")
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, increment: int) -> bytes:
    """Allows the other side to send more bytes; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _NUMBER.pack(increment))


def reset(stream_id: int, code: int) -> bytes:
    """Ends a stream."""
    return frame(RST_STREAM, 0, stream_id, _NUMBER.pack(code))


def parse_number(payload: bytes) -> int:
    """The one number of a WINDOW_UPDATE or RST_STREAM frame."""
    if len(payload) != _NUMBER.size:
        raise ProtocolError(FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int(_NUMBER.unpack(payload)[0])


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    """Announces the connection's end."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + reason.encode())


def parse_goaway(payload: bytes) -> tuple[int, int, str]:
    """Last stream that was taken, code, reason."""
    if len(payload) < _GOAWAY.size:
        raise ProtocolError(FRAME_SIZE_ERROR, "a GOAWAY frame that is too short")
    last_stream_id, code = _GOAWAY.unpack_from(payload)
    return last_stream_id & MAX_WINDOW, code, payload[_GOAWAY.size :].decode("utf-8", "replace")


def content(flags: int, payload: bytes) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and priority."""
    end, at = len(payload), 0
    if flags & PADDED:
        if not payload:
            raise ProtocolError(FRAME_SIZE_ERROR, "a padded frame without a length")
        end, at = end - payload[0], 1
    if flags & WITH_PRIORITY:
        at += 5
    if at > end:
        raise ProtocolError(PROTOCOL_ERROR, "a frame with more padding than content")
    return payload[at:end]
