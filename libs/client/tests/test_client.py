"""The embedder's clients, on asyncio and without, against a small real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

from tidemill import sync
from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.requests import generate_request
from tidemill.v1 import errors_pb2, inference_pb2, inference_pb2_grpc

Act = Callable[[Any, Any], Any]
DETAIL = errors_pb2.ErrorDetail(
    code=errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, message="busy", field="tenant", limit="8 requests", retry_after_s=2.0
)


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each prompt word by word, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        if request.model != "m":
            await self._refuse(context)
        n = request.sampling.n if request.sampling.HasField("n") else 1
        try:
            for position, word in enumerate(request.text.split()):
                deltas = [
                    inference_pb2.ChoiceDelta(index=i, text=f"{word} ", token_ids=[position])
                    for i in reversed(range(n))
                ]
                yield inference_pb2.GenerateResponse(request_id="r-1", model="m@1", choices=deltas)
            if request.text == "wait":
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        ends = [inference_pb2.ChoiceDelta(index=i, finish_reason=inference_pb2.FINISH_REASON_STOP) for i in range(n)]
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        yield inference_pb2.GenerateResponse(choices=ends, usage=usage, timing=inference_pb2.Timing(total_s=1.0))

    async def GetModel(self, request: Any, context: Any) -> Any:
        if request.model != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        return inference_pb2.GetModelResponse(model=inference_pb2.Model(name="m"))

    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m"), inference_pb2.Model(name="n")])

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return inference_pb2.TokenizeResponse(token_ids=[1, 2], tokens=[b"a", b"b"])

    async def _refuse(self, context: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(DETAIL)
        status = status_pb2.Status(code=8, message=DETAIL.message, details=[packed]).SerializeToString()
        trailers = (("grpc-status-details-bin", status),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, DETAIL.message, trailing_metadata=trailers)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Inference, str]]:
    servicer, server = Inference(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_generation_streams(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        texts = [delta.text async for item in client.generate(model="m", text="to be") for delta in item.choices]
    assert texts == ["to ", "be ", ""]


async def test_a_completion_joins_every_choice(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        done = await client.complete(model="m", text="to be", n=2)
    assert [choice.text for choice in done.choices] == ["to be ", "to be "]
    assert done.choices[1].token_ids == [0, 1]
    assert done.choices[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert (done.text, done.request_id, done.model) == ("to be ", "r-1", "m@1")
    assert (done.usage.completion_tokens, done.timing.total_s, done.placement) == (2, 1.0, None)


async def test_models_and_tokens_are_told(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        assert [model.name for model in await client.models()] == ["m", "n"]
        assert (await client.model("m")).name == "m"
        answer = await client.tokenize(model="m", messages=[{"role": "user", "content": "hi"}])
    assert list(answer.token_ids) == [1, 2]
    assert served[0].requests[0].chat.messages[0].content == "hi"


async def test_a_refusal_arrives_with_code_field_limit_and_retry(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        with pytest.raises(TidemillError) as failed:
            await client.complete(model="other", text="x")
    error = failed.value
    assert (error.code, error.message, error.field, error.limit, error.retry_after_s) == (
        errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
        "busy",
        "tenant",
        "8 requests",
        2.0,
    )
    assert str(error) == "RESOURCE_EXHAUSTED (tenant): busy"


async def test_a_bare_status_still_has_a_code(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        with pytest.raises(TidemillError) as failed:
            await client.model("other")
    assert failed.value.code == errors_pb2.ERROR_CODE_NOT_FOUND


async def test_a_gateway_that_is_not_there_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(TidemillError) as failed:
            await client.models()
    assert failed.value.code == errors_pb2.ERROR_CODE_UNAVAILABLE


async def test_leaving_the_stream_cancels_the_request(served: tuple[Inference, str]) -> None:
    async with Client(served[1]) as client:
        stream = client.generate(model="m", text="wait")
        await anext(stream)
        await stream.aclose()
        await served[0].cancelled.wait()


async def test_a_call_that_a_stopping_server_drops_may_be_made_again_elsewhere() -> None:
    """gRPC ends a call that meets a server in the moment at which it stops with a bare CANCELLED."""
    codes = set()

    async def ask_until_it_fails(client: Client) -> None:
        while True:
            try:
                await client.complete(model="m", text="a b")
            except TidemillError as error:
                codes.add(error.code)
                return

    for _ in range(10):
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with Client(f"127.0.0.1:{port}") as client:
            await client.models()
            lanes = [asyncio.create_task(ask_until_it_fails(client)) for _ in range(6)]
            await client.models()
            await server.stop(1.0)
            await asyncio.gather(*lanes)
    assert codes == {errors_pb2.ERROR_CODE_UNAVAILABLE}


async def test_the_key_travels_as_a_bearer_token(served: tuple[Inference, str]) -> None:
    async with Client(served[1], api_key="k-1") as client:
        await client.complete(model="m", text="x")
    assert served[0].metadata["authorization"] == "Bearer k-1"


async def test_the_client_without_asyncio_does_the_same(served: tuple[Inference, str]) -> None:
    def use() -> None:
        with sync.Client(served[1], api_key="k-1") as client:
            assert client.complete(model="m", text="to be").text == "to be "
            assert [model.name for model in client.models()] == ["m", "n"]
            assert client.model("m").name == "m"
            assert list(client.tokenize(model="m", text="x").token_ids) == [1, 2]
            stream = client.generate(model="m", text="wait")
            assert next(stream).choices[0].text == "wait "
            stream.close()
            with pytest.raises(TidemillError) as failed:
                client.complete(model="other", text="x")
            assert failed.value.limit == "8 requests"

    await asyncio.to_thread(use)
    await served[0].cancelled.wait()


def test_options_reach_the_fields_of_the_contract() -> None:
    request = generate_request(
        "m",
        token_ids=[1, 2],
        request_id="r",
        priority=-3,
        timeout_s=2.5,
        ttft_s=0.5,
        temperature=0.0,
        max_tokens=5,
        logit_bias={7: -100.0},
        stop=["\n"],
        seed=2**40,
        json_schema='{"type": "object"}',
        tools=[{"name": "look", "parameters_json": "{}"}],
        tool_choice="look",
        include_placement=True,
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert (request.request_id, request.priority, request.timeout_s, request.slo.ttft_s) == ("r", -3, 2.5, 0.5)
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert (request.sampling.max_tokens, request.sampling.seed, dict(request.sampling.logit_bias)) == (
        5,
        2**40,
        {7: -100.0},
    )
    assert request.response_format.type == inference_pb2.ResponseFormat.TYPE_JSON_SCHEMA
    assert request.tool_choice.mode == inference_pb2.ToolChoice.MODE_NAMED
    assert request.tools[0].name == "look"
    assert request.include_placement


def test_an_absent_option_stays_absent() -> None:
    request = generate_request("m", text="x", tool_choice="auto", json_object=True)
    assert not request.sampling.HasField("temperature")
    assert request.tool_choice.mode == inference_pb2.ToolChoice.MODE_AUTO
    assert request.response_format.type == inference_pb2.ResponseFormat.TYPE_JSON_OBJECT


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 2**40}, "sampling.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": ["\ud800"]}, "sampling.stop"),
        ({"text": "\ud800"}, "text"),
        ({"text": None, "token_ids": [-1]}, "token_ids.ids"),
        ({"text": None, "messages": [{"role": "user"}, {"rule": "user"}]}, "chat.messages[1].rule"),
        ({"tools": [{"title": "x"}]}, "tools[0].title"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(TidemillError) as failed:
        generate_request("m", **{"text": "x", **options})
    assert failed.value.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert failed.value.field == field


@pytest.mark.parametrize("given", [{}, {"text": "x", "token_ids": [1]}, {"text": "x", "beams": 4}])
def test_a_call_that_is_wrong_in_itself_is_a_type_error(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        generate_request("m", **given)
