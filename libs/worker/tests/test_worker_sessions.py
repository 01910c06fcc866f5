"""A gateway's outbox."""

import pytest

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.sessions import GatewaySession


def message(number: int) -> worker_pb2.ConnectResponse:
    """A message that can be told apart."""
    return worker_pb2.ConnectResponse(step=worker_pb2.StepOutputs(step=number))


async def test_messages_come_in_order_and_the_stream_ends_after_them() -> None:
    session = GatewaySession(common_pb2.InstanceRef(), 10)
    for number in range(3):
        session.push(message(number))
    session.close()
    session.push(message(9))
    assert [item.step.step async for item in session.messages()] == [0, 1, 2]


async def test_a_gateway_that_does_not_read_is_cut_off_with_a_named_limit() -> None:
    session = GatewaySession(common_pb2.InstanceRef(), 2)
    for number in range(3):
        session.push(message(number))
    with pytest.raises(MeshError) as raised:
        async for _ in session.messages():
            pass
    assert raised.value.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert raised.value.limit == "2 messages"
    assert session.num_queued == 0
