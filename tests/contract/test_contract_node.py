"""The public contract from Node: what a client that compiles only proto/tidemill/v1 sees."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from tidemill.v1 import errors_pb2, inference_pb2, inference_pb2_grpc
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError
from tidemill_mesh.server import Servicer, serve_grpc

NodeCall = Callable[..., Any]
OK = grpc.StatusCode.OK.value[0]


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each chat with its own words, and refuses a temperature as a gateway would."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.sampling.temperature > 2:
            raise MeshError(
                errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
                "must be from 0 to 2",
                field="sampling.temperature",
                limit="2",
                retry_after_s=0.5,
            )
        for word in request.chat.messages[0].content.split():
            delta = inference_pb2.ChoiceDelta(text=word, token_ids=[7])
            yield inference_pb2.GenerateResponse(request_id=request.request_id, choices=[delta])
        last = inference_pb2.ChoiceDelta(finish_reason=inference_pb2.FINISH_REASON_STOP)
        yield inference_pb2.GenerateResponse(choices=[last], usage=inference_pb2.Usage(completion_tokens=2))

    async def GetModel(self, request: Any, context: Any) -> Any:
        raise MeshError(errors_pb2.ERROR_CODE_MODEL_NOT_FOUND, "no such model", field="model")

    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m", context_tokens=1024)])


@pytest.fixture
async def address() -> AsyncIterator[str]:
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    async with serve_grpc(ServiceSettings(), [Servicer(add, Inference(), name)]) as server:
        yield server.endpoint


def question(**sampling: Any) -> dict[str, Any]:
    """A chat request as Node's proto loader takes it."""
    messages = [{"role": "user", "content": "grüße 世界"}]
    return {"request_id": "r-1", "model": "m", "chat": {"messages": messages}, "sampling": sampling}


async def test_node_streams_a_generation(node_call: NodeCall, address: str) -> None:
    answer = await node_call(address, "Generate", question(max_tokens=4))
    assert answer.status == OK
    assert [item["choices"][0].get("text") for item in answer.responses[:2]] == ["grüße", "世界"]
    assert answer.responses[-1]["choices"][0]["finish_reason"] == "FINISH_REASON_STOP"
    assert answer.responses[-1]["usage"]["completion_tokens"] == 2


async def test_node_reads_the_error_with_its_field_and_limit(node_call: NodeCall, address: str) -> None:
    answer = await node_call(address, "Generate", question(temperature=3))
    assert answer.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answer.responses == []
    assert answer.error == {
        "code": "ERROR_CODE_INVALID_ARGUMENT",
        "message": "must be from 0 to 2",
        "field": "sampling.temperature",
        "limit": "2",
        "retry_after_s": 0.5,
    }


async def test_node_calls_the_unary_methods(node_call: NodeCall, address: str) -> None:
    listed = await node_call(address, "ListModels", {})
    assert (listed.status, listed.responses[0]["models"][0]["name"]) == (OK, "m")
    missing = await node_call(address, "GetModel", {"model": "x"})
    assert missing.status == grpc.StatusCode.NOT_FOUND.value[0]
    assert missing.error["code"] == "ERROR_CODE_MODEL_NOT_FOUND"


async def test_node_talks_to_a_real_cluster(node_call: NodeCall, cluster: Any) -> None:
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = {"model": cluster.model, "text": "hello", "sampling": sampling}
    answer = await node_call(cluster.grpc, "Generate", request)
    assert answer.status == OK, answer.details
    assert sum(len(delta.get("token_ids", [])) for item in answer.responses for delta in item["choices"]) == 8
    assert answer.responses[-1]["usage"]["completion_tokens"] == 8
    refused = await node_call(cluster.grpc, "Generate", {**request, "sampling": {"temperature": -1}})
    assert refused.error["field"] == "sampling.temperature"
