"""Names the field of a serialised message whose text is not UTF-8, which protobuf itself does not say."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MAX_DEPTH = 32


class _Malformed(Exception):
    """The bytes are no message at all."""


def bad_text_field(data: bytes, descriptor: Descriptor) -> str:
    """Path of the first text field that is not UTF-8, such as `chat.messages[2].content`; empty: there is none."""
    try:
        return _search(memoryview(data), descriptor, "", MAX_DEPTH)
    except _Malformed:
        return ""


def _search(data: memoryview, descriptor: Descriptor, prefix: str, depth: int) -> str:
    at = 0
    seen: dict[int, int] = {}
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind != _LENGTH:
            at = _skip(data, at, kind)
            continue
        length, at = _varint(data, at)
        part = data[at : at + length]
        if len(part) < length:
            raise _Malformed
        at += length
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        index = seen[number] = seen.get(number, -1) + 1
        path = f"{prefix}{field.name}[{index}]" if field.is_repeated else f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(part):
            return path
        if field.message_type is not None and depth:
            found = _search(part, field.message_type, f"{path}.", depth - 1)
            if found:
                return found
    return ""


def _skip(data: memoryview, at: int, kind: int) -> int:
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4)
    raise _Malformed


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _Malformed
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed


def _is_utf8(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
