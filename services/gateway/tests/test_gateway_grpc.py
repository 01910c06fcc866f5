"""The public gRPC API by its own client."""

import asyncio

import grpc
import pytest
import pytest_asyncio
from gateway_emulated import EOS, TEXT, canned
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.v1 import errors_pb2
from tidemill.v1 import inference_pb2 as pb
from tidemill.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def mesh(shared_mesh):
    for worker in shared_mesh.fleet.values():
        worker.answer, worker.step_s, worker.paused = canned(TEXT), 0.001, False
        worker.submits.clear()
    return shared_mesh


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh):
    async with Client(mesh.grpc_endpoint) as client:
        yield client


async def responses(client, **options):
    return [response async for response in client.generate(model="tiny", **options)]


async def test_text_messages_and_ids_give_tokens(client):
    for given in ({"text": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}, {"token_ids": [1, 2]}):
        assert (await client.complete(model="tiny", max_tokens=20, **given)).text == TEXT[:20]


async def test_usage_and_timing_come_with_the_last_message_only_and_placement_with_the_first_too(client):
    messages = await responses(client, text="hello", max_tokens=8, include_placement=True)
    assert [i for i, m in enumerate(messages) if m.HasField("placement")] == [0, len(messages) - 1]
    assert messages[0].placement.prefill_instance == messages[-1].placement.prefill_instance != ""
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    last = messages[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens_l1) == (5, 8, 16)
    assert last.timing.total_s >= last.timing.ttft_s > 0
    assert last.placement.attempts == 1
    assert last.model == "tiny@rev-tiny"
    assert len({m.request_id for m in messages}) == 1


async def test_the_stop_token_is_among_the_ids_and_has_no_text(client, mesh):
    for worker in mesh.fleet.values():
        worker.answer = canned("ok")
    last = (await responses(client, text="x"))[-1]
    assert list(last.choices[0].token_ids)[-1] == EOS
    assert last.choices[0].finish_reason == pb.FINISH_REASON_STOP


async def test_a_stop_string_is_named(client):
    done = await client.complete(model="tiny", text="x", stop=["truth"])
    assert done.text == TEXT.partition("truth")[0]


async def test_models_can_be_listed_and_asked_for(client, mesh):
    assert [(m.name, m.ready, m.context_tokens) for m in await client.models()] == [("tiny", True, 1024)]
    async with grpc.aio.insecure_channel(mesh.grpc_endpoint) as channel:
        answer = await InferenceServiceStub(channel).GetModel(pb.GetModelRequest(model="tiny-alias"))
        assert answer.model.revision == "rev-tiny"


async def test_texts_and_messages_can_be_tokenised(mesh):
    async with grpc.aio.insecure_channel(mesh.grpc_endpoint) as channel:
        stub = InferenceServiceStub(channel)
        answer = await stub.Tokenize(pb.TokenizeRequest(model="tiny", text="hé"))
        assert list(answer.token_ids) == list("hé".encode())
        assert b"".join(answer.tokens) == "hé".encode()
        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
        answer = await stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=chat))
        assert b"".join(answer.tokens) == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"text": ""}, errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "text"),
        ({"token_ids": [264]}, errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "token_ids"),
        ({"text": "x", "temperature": float("nan")}, errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "sampling.temperature"),
        ({"text": "x", "max_tokens": 0}, errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "sampling.max_tokens"),
        ({"text": "x", "max_tokens": 5000}, errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "sampling.max_tokens"),
        ({"text": "x" * 5000}, errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "text"),
        ({"text": "x", "request_id": "no spaces"}, errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "request_id"),
    ],
)
async def test_a_wrong_value_is_refused_by_code_and_field(client, options, code, field):
    with pytest.raises(TidemillError) as caught:
        await client.complete(model="tiny", **options)
    assert (caught.value.code, caught.value.field) == (code, field)


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(TidemillError) as caught:
        await client.complete(model="nope", text="x")
    assert caught.value.code == errors_pb2.ERROR_CODE_MODEL_NOT_FOUND


async def test_a_live_request_id_is_refused_a_second_time(client, mesh):
    for worker in mesh.fleet.values():
        worker.paused = True
    first = asyncio.create_task(client.complete(model="tiny", text="x", max_tokens=30, request_id="same"))
    await mesh.until(lambda: mesh.holds() > 0)
    with pytest.raises(TidemillError) as caught:
        await client.complete(model="tiny", text="x", request_id="same")
    assert caught.value.code == errors_pb2.ERROR_CODE_ALREADY_EXISTS
    for worker in mesh.fleet.values():
        worker.paused = False
    assert (await first).text == TEXT[:30]


async def test_health_says_serving(mesh):
    async with grpc.aio.insecure_channel(mesh.grpc_endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service="tidemill.v1.InferenceService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
