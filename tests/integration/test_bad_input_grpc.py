"""What embedders send by gRPC that is wrong, odd or too much, on a real cluster."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from harness.running import RunningCluster

from tidemill.client import Client, Completion
from tidemill.errors import TidemillError, from_rpc_error
from tidemill.requests import generate_request
from tidemill.v1 import errors_pb2
from tidemill.v1.inference_pb2 import FINISH_REASON_STOP, GenerateRequest, GenerateResponse

# The first test's time includes the start of a cluster.
GENERATE = "/tidemill.v1.InferenceService/Generate"
EOS = 258
TOO_SHORT_S = 0.1
"""For 900 tokens, each of which takes a step and a message."""
INVALID = errors_pb2.ERROR_CODE_INVALID_ARGUMENT
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with cluster.client() as client:
        yield client


async def refusal(client: Client, **fields: Any) -> TidemillError:
    with pytest.raises(TidemillError) as caught:
        await client.complete(**{"model": "tiny-llama", "max_tokens": 4, **fields})
    return caught.value


async def raw(cluster: RunningCluster, message: bytes) -> list[GenerateResponse]:
    """Sends bytes as a GenerateRequest."""
    async with grpc.aio.insecure_channel(cluster.grpc, options=UNLIMITED) as channel:
        call = channel.unary_stream(
            GENERATE, request_serializer=lambda given: given, response_deserializer=GenerateResponse.FromString
        )
        try:
            return [response async for response in call(message, timeout=300)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"model": "nobody", "text": "x"}, errors_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
        ({"text": ""}, INVALID, "text"),
        ({"token_ids": []}, INVALID, "token_ids"),
        ({"messages": []}, INVALID, "messages"),
        ({"text": "x", "max_tokens": 0}, INVALID, "sampling.max_tokens"),
        ({"text": "x", "max_tokens": -3}, INVALID, "sampling.max_tokens"),
        ({"text": "x", "temperature": -1.0}, INVALID, "sampling.temperature"),
        ({"text": "x", "temperature": float("nan")}, INVALID, "sampling.temperature"),
        ({"text": "x", "temperature": float("inf")}, INVALID, "sampling.temperature"),
        ({"text": "x", "top_p": float("nan")}, INVALID, "sampling.top_p"),
        ({"text": "x", "min_p": float("-inf")}, INVALID, "sampling.min_p"),
        ({"text": "x", "logit_bias": {1: float("nan")}}, INVALID, "sampling.logit_bias"),
        ({"text": "x", "timeout_s": float("nan")}, INVALID, "timeout_s"),
        ({"text": "x", "timeout_s": -1.0}, INVALID, "timeout_s"),
        ({"token_ids": [264]}, INVALID, "token_ids"),
        ({"token_ids": [0] * 1024}, errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "token_ids"),
        ({"token_ids": [0] * 1021}, errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "sampling.max_tokens"),
        ({"text": "x", "json_schema": "{"}, INVALID, "response_format.json_schema"),
        ({"text": "x", "request_id": "a b"}, INVALID, "request_id"),
    ],
)
async def test_a_wrong_value_is_refused_and_the_field_is_named(client, fields, code, field):
    error = await refusal(client, **fields)
    assert (error.code, error.field) == (code, field)


async def test_no_input_and_unknown_enum_values_are_refused_by_name(cluster):
    for request, field in (
        (GenerateRequest(model="tiny-llama"), "input"),
        (GenerateRequest(model="tiny-llama", text="x", tool_choice={"mode": 77}), "tool_choice.mode"),
    ):
        with pytest.raises(TidemillError) as caught:
            await raw(cluster, request.SerializeToString())
        assert (caught.value.code, caught.value.field) == (INVALID, field)


async def test_fields_of_a_newer_contract_are_ignored(cluster):
    request = generate_request("tiny-llama", text="The tide", max_tokens=3, ignore_eos=True)
    # Field 999, a string.
    newer = request.SerializeToString() + b"\xba\x3e\x05later"
    last = (await raw(cluster, newer))[-1]
    assert last.usage.completion_tokens == 3


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80"], ids=["invalid UTF-8", "lone surrogate"])
async def test_text_that_is_no_utf8_ends_this_call_only(cluster, client, text):
    request = GenerateRequest(model="tiny-llama").SerializeToString() + b"\x1a" + bytes([len(text)]) + text
    with pytest.raises(TidemillError) as caught:
        await raw(cluster, request)
    assert (caught.value.code, caught.value.field) == (INVALID, "text")
    assert (await client.complete(model="tiny-llama", text="x", max_tokens=1)).usage.completion_tokens == 1


async def test_bytes_that_are_no_message_end_this_call_only(cluster, client):
    with pytest.raises(TidemillError, match="no message"):
        await raw(cluster, b"\x0a\xff\xff\xff\xff\x0f")
    assert (await client.complete(model="tiny-llama", text="x", max_tokens=1)).usage.completion_tokens == 1


async def test_the_client_itself_names_text_that_no_message_can_carry(client):
    error = await refusal(client, text="\ud800")
    assert (error.code, error.field) == (INVALID, "text")


async def test_a_message_over_the_limit_is_refused_with_the_limit(cluster, client):
    request = GenerateRequest(model="tiny-llama", text="x" * (65 << 20))
    with pytest.raises(TidemillError) as caught:
        await raw(cluster, request.SerializeToString())
    assert (caught.value.code, caught.value.limit) == (errors_pb2.ERROR_CODE_TOO_LARGE, f"{64 << 20} bytes")
    assert (await client.complete(model="tiny-llama", text="x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_prompt_of_a_million_tokens_is_refused_by_the_context_not_by_the_message_limit(client):
    error = await refusal(client, token_ids=[1] * 1_000_000)
    assert (error.code, error.limit) == (errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "1024 tokens")


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_one_and_two_tokens_are_exactly_that(client, max_tokens):
    # New and long, so that no decode instance would rather compute it itself.
    sure = {"model": "tiny-llama", "token_ids": [max_tokens] * 500, "temperature": 0.0, "ignore_eos": True}
    shorter = await client.complete(max_tokens=max_tokens, include_placement=True, **sure)
    longer = await client.complete(max_tokens=8, **sure)
    assert shorter.choices[0].token_ids == longer.choices[0].token_ids[:max_tokens]
    assert shorter.usage.completion_tokens == max_tokens
    assert shorter.placement.prefill_instance == "prefill-1"
    # The only token needs no decode instance.
    assert shorter.placement.decode_instance == ("" if max_tokens == 1 else "decode-1")


async def test_a_turn_that_stops_at_once_is_empty_and_its_session_goes_on(cluster, client):
    async def turn(prompt: list[int], **more: Any) -> Completion:
        return await client.complete(
            model="tiny-llama", token_ids=prompt, max_tokens=8, temperature=0.0, program_id="session-99", **more
        )

    # New and long, so that prefill and decode are two instances.
    prompt = [(7 * i + 3) % 250 for i in range(400)]
    first = await turn(prompt, ignore_eos=True)
    prompt += [*first.choices[0].token_ids, *range(40)]
    empty = await turn(prompt, logit_bias={EOS: 100.0})
    assert (empty.text, list(empty.choices[0].token_ids)) == ("", [EOS])
    assert empty.choices[0].finish_reason == FINISH_REASON_STOP
    assert (empty.usage.prompt_tokens, empty.usage.completion_tokens) == (len(prompt), 1)
    await cluster.holds_are_zero()
    prompt += [EOS, *range(40, 80)]
    third = await turn(prompt, ignore_eos=True)
    assert third.usage.completion_tokens == 8
    assert third.usage.prompt_tokens == len(prompt)
    assert (await turn(prompt, ignore_eos=True)).choices[0].token_ids == third.choices[0].token_ids


async def test_a_live_request_id_is_refused_a_second_time_and_the_first_goes_on(client):
    errors: list[TidemillError] = []
    for number in range(10):
        sure = {"model": "tiny-llama", "text": "High water", "request_id": f"twice-{number}", "ignore_eos": True}
        first = client.generate(max_tokens=300, **sure)
        tokens = sum(len(delta.token_ids) for delta in (await anext(first)).choices)
        try:
            await client.complete(max_tokens=4, **sure)
        except TidemillError as error:
            errors.append(error)
        async for response in first:
            tokens += sum(len(delta.token_ids) for delta in response.choices)
        assert tokens == 300
        # Unless this process was not run until the first had ended.
        if errors:
            break
    assert [(error.code, error.field) for error in errors] == [(errors_pb2.ERROR_CODE_ALREADY_EXISTS, "request_id")]


async def test_a_call_that_is_cancelled_in_mid_stream_leaves_nothing(cluster, client):
    stream = client.generate(model="tiny-llama", text="Ebb", max_tokens=900, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    await cluster.holds_are_zero()


async def test_a_call_whose_time_is_over_is_told_so_and_leaves_nothing_on_either_leg(cluster, client):
    with pytest.raises(TidemillError) as caught:
        async for _ in client.generate(
            model="tiny-llama", text="Ebb", max_tokens=900, ignore_eos=True, timeout_s=TOO_SHORT_S
        ):
            pass
    assert caught.value.code == errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await cluster.holds_are_zero()


async def test_a_client_that_reads_slowly_gets_every_token_and_slows_nobody(client):
    sure = {"model": "tiny-llama", "max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    expected = (await client.complete(text="slow", **sure)).choices[0].token_ids

    async def slowly() -> list[int]:
        tokens: list[int] = []
        async for response in client.generate(text="slow", **sure):
            tokens += [token for delta in response.choices for token in delta.token_ids]
            await asyncio.sleep(0.02)
        return tokens

    slow = asyncio.create_task(slowly())
    fast = await asyncio.gather(*(client.complete(text=f"fast {i}", **{**sure, "max_tokens": 20}) for i in range(8)))
    assert all(answer.usage.completion_tokens == 20 for answer in fast)
    assert await slow == expected


async def test_two_hundred_requests_at_once_all_complete_and_leave_nothing(cluster, client):
    answers = await asyncio.gather(
        *(
            client.complete(model="tiny-llama", text=f"request {i}", max_tokens=16, ignore_eos=True, timeout_s=400.0)
            for i in range(200)
        ),
        return_exceptions=True,
    )
    assert [str(answer) for answer in answers if isinstance(answer, BaseException)] == []
    assert [answer.usage.completion_tokens for answer in answers] == [16] * 200
    await cluster.holds_are_zero()


async def test_afterwards_no_rank_has_restarted_and_nothing_is_held(cluster):
    await cluster.holds_are_zero()
    view = await cluster.look()
    starts = {name: view.members[name].status.counters["domain_starts"] for name in ("prefill-1", "decode-1")}
    assert starts == {"prefill-1": 1, "decode-1": 1}
