"""Messages, frames and trailers survive whatever pieces they arrive in."""

import grpc
import pytest
from grpc.aio import AioRpcError
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_mesh.streams import frames
from tidemill_mesh.streams.frames import ProtocolError
from tidemill_mesh.streams.message_reader import MessageReader, prefix
from tidemill_mesh.streams.status import call_error, from_trailers, to_trailers


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_the_same_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(prefix(len(message)) + message for message in messages)
    reader, taken, at, i = MessageReader(100), [], 0, 0
    while at < len(data):
        size = cuts[i % len(cuts)]
        taken += reader.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert taken == messages
    assert not reader.in_message


@pytest.mark.parametrize("data", [prefix(101), b"\1" + prefix(3)[1:]], ids=["too large", "compressed"])
def test_a_message_that_is_not_taken_is_refused_by_its_head(data: bytes) -> None:
    with pytest.raises(AioRpcError):
        MessageReader(100).feed(data)


@given(payload=st.binary(max_size=20), padding=st.integers(0, 20), priority=st.booleans())
def test_padding_and_priority_are_taken_off(payload: bytes, padding: int, priority: bool) -> None:
    flags = frames.PADDED | (frames.WITH_PRIORITY if priority else 0)
    whole = bytes([padding]) + (b"12345" if priority else b"") + payload + bytes(padding)
    assert frames.content(flags, whole) == payload
    with pytest.raises(ProtocolError):
        frames.content(flags, bytes([len(whole)]) + whole[1:])


@given(
    length=st.integers(0, (1 << 24) - 1), kind=st.integers(0, 255), flags=st.integers(0, 255), stream=st.integers(0, 99)
)
def test_a_frames_head_says_what_it_was_made_of(length: int, kind: int, flags: int, stream: int) -> None:
    made = frames.head(kind, flags, stream, length)
    assert len(made) == frames.HEAD_BYTES
    assert frames.parse_head(made, 0) == (length, kind, flags, stream)


@given(text=st.text(max_size=40), detail=st.binary(max_size=40), code=st.sampled_from(list(grpc.StatusCode)))
def test_a_status_survives_its_trailers(text: str, detail: bytes, code: grpc.StatusCode) -> None:
    if code is grpc.StatusCode.OK:
        assert from_trailers(to_trailers(None)) is None
        return
    given = from_trailers(to_trailers(call_error(code, text, [("x-bin", detail), ("y", "z")])))
    assert given is not None
    assert (given.code(), given.details()) == (code, text)
    assert list(given.trailing_metadata() or ()) == [("x-bin", detail), ("y", "z")]
    assert from_trailers([]) is not None
