"""Text that is not UTF-8 is named by its field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.worker_pb2 import ConnectRequest
from tidemill.v1 import inference_pb2 as pb
from tidemill_mesh.wire_text import bad_text_field

BAD = b"\xed\xa0\x80"
MARK = "MARK"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(model="m", text=MARK), "text"),
        (pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(), pb.ChatMessage(content=MARK)])),
         "chat.messages[1].content"),
        (pb.GenerateRequest(sampling=pb.SamplingParams(temperature=1.0, seed=-1, stop=["a", "b", MARK])),
         "sampling.stop[2]"),
        (pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={1: 2.0}), program_id=MARK), "program_id"),
    ],
)  # fmt: skip
def test_the_path_of_the_field_is_given(message, field):
    # As many bytes as the mark has, so that the lengths around stay right.
    data = message.SerializeToString().replace(MARK.encode(), BAD + b"x")
    assert bad_text_field(data, type(message).DESCRIPTOR) == field
    assert bad_text_field(message.SerializeToString(), type(message).DESCRIPTOR) == ""


@given(st.binary(max_size=60))
def test_any_bytes_are_taken(data):
    assert isinstance(bad_text_field(data, ConnectRequest.DESCRIPTOR), str)
