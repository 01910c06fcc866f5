"""The official client, unchanged, against each point it depends on."""

import asyncio
import json

import httpx2
import openai
import pytest
import pytest_asyncio
from gateway_emulated import EOS, TEXT, canned
from pydantic import BaseModel

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def emulated_mesh(shared_mesh):
    for worker in shared_mesh.fleet.values():
        worker.answer, worker.step_s = canned(TEXT), 0.001
        worker.aborts.clear()
        worker.submits.clear()
    return shared_mesh


@pytest_asyncio.fixture(loop_scope="module")
async def client(emulated_mesh):
    async with openai.AsyncOpenAI(base_url=f"{emulated_mesh.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(mesh, text, *, ends=True):
    for worker in mesh.fleet.values():
        worker.answer = canned(text, ends=ends)


def last_submit(mesh):
    return next(worker for worker in mesh.fleet.values() if worker.submits).submits[-1]


# --- whole answers ----------------------------------------------------------------------------------------------------


async def test_chat_answers_with_text_usage_and_a_request_id(client):
    answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=10)
    assert answer.choices[0].message.content == TEXT[:10]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (10, answer.usage.prompt_tokens + 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer._request_id.startswith("req-")


async def test_the_end_of_sequence_ends_with_stop(client, emulated_mesh):
    says(emulated_mesh, "fine.")
    answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("fine.", "stop")
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_one_and_two_tokens_are_exactly_that(client, emulated_mesh, max_tokens):
    answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=max_tokens)
    assert answer.choices[0].message.content == TEXT[:max_tokens]
    assert answer.usage.completion_tokens == max_tokens
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)


async def test_completions_take_text_ids_and_lists_of_both(client):
    for prompt in ("hello", [104, 105], ["one", "two"], [[1, 2], [3]]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert [c.index for c in answer.choices] == list(range(2 if several else 1))
        assert all(c.text == TEXT[:4] for c in answer.choices)


async def test_lists_of_prompts_with_n_index_choices_prompt_by_prompt(client, emulated_mesh):
    for worker in emulated_mesh.fleet.values():
        worker.answer = lambda prompt, choice, position: prompt[position] if position < len(prompt) else EOS
    answer = await client.completions.create(model="tiny", prompt=["ab", "cd"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert answer.usage.prompt_tokens == 4


async def test_content_parts_null_content_and_tool_messages_are_taken(client, emulated_mesh):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    await client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=3)
    prompt = bytes(i for i in memoryview(last_submit(emulated_mesh).token_ids).cast("I") if i < 256).decode()
    assert "system\nbe brief" in prompt
    assert "one\ntwo" in prompt
    assert '"name": "weather"' in prompt
    assert "<tool_response>\nsunny" in prompt
    assert last_submit(emulated_mesh).sampling.max_tokens == 3


async def test_unknown_fields_are_ignored_and_counted(client, emulated_mesh):
    await client.chat.completions.create(model="tiny", messages=HI, max_tokens=2, extra_body={"banana": 1})
    async with httpx2.AsyncClient(timeout=120) as http:
        metrics = (await http.get(f"{emulated_mesh.http}/metrics")).text
    assert "tidemill_gateway_unknown_fields_total 1.0" in metrics


# --- streams ----------------------------------------------------------------------------------------------------------


async def chunks_of(stream):
    return [chunk async for chunk in stream]


async def test_chunks_have_one_role_one_identity_and_the_finish_last(client):
    chunks = await chunks_of(
        await client.chat.completions.create(model="tiny", messages=HI, max_tokens=30, stream=True)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT[:30]
    assert [c.choices[0].delta.role for c in chunks if c.choices[0].delta.role] == ["assistant"]
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(c.usage is None for c in chunks)


async def test_usage_comes_once_and_last_when_it_was_asked_for(client):
    chunks = await chunks_of(
        await client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_first_chunks_of_choices_come_in_order_of_index(client):
    stream = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=4, n=3, stream=True)
    chunks = await chunks_of(stream)
    assert [c.choices[0].index for c in chunks[:3]] == [0, 1, 2]
    for i in range(3):
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) == TEXT[:4]


async def test_the_stream_helper_assembles_the_answer(client, emulated_mesh):
    says(emulated_mesh, "twice the same")
    async with client.chat.completions.stream(model="tiny", messages=HI, n=2, logprobs=True) as stream:
        final = await stream.get_final_completion() if [e async for e in stream] else None
    assert [c.message.content for c in final.choices] == ["twice the same"] * 2
    assert len(final.choices[0].logprobs.content) == 14


async def test_streamed_stop_strings_equal_those_at_once(client):
    for stop in ("truth", ["universally", "truth u"], [" a"]):
        whole = await client.completions.create(model="tiny", prompt="p", max_tokens=90, stop=stop)
        chunks = await chunks_of(
            await client.completions.create(model="tiny", prompt="p", max_tokens=90, stop=stop, stream=True)
        )
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
        assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        first = [stop] if isinstance(stop, str) else stop
        assert not any(one in whole.choices[0].text for one in first)


async def test_a_stop_string_ends_the_workers_work_at_once(client, emulated_mesh):
    await client.completions.create(model="tiny", prompt="p", max_tokens=1000, stop="truth")
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)
    assert any(worker.aborts for worker in emulated_mesh.fleet.values())


async def test_multibyte_text_streams_whole_characters(client, emulated_mesh):
    text = "né 漢字 😀 e\u0301!"
    says(emulated_mesh, text)
    chunks = await chunks_of(await client.chat.completions.create(model="tiny", messages=HI, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


# --- log-probabilities ------------------------------------------------------------------------------------------------


async def test_chat_logprobs_name_tokens_bytes_and_alternatives(client):
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert bytes(content[0].bytes) == content[0].token.encode()
    assert [len(entry.top_logprobs) for entry in content] == [3] * 5


async def test_a_stop_token_is_not_among_the_logprobs(client, emulated_mesh):
    says(emulated_mesh, "ok")
    answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["o", "k"]


async def test_completion_logprobs_have_offsets_and_the_sampled_token(client):
    answer = await client.completions.create(model="tiny", prompt="p", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.tokens == list(TEXT[:4])
    pairs = zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
    assert all(len(top) == 3 and token in top for top, token in pairs)


async def test_streamed_completion_logprobs_continue_their_offsets(client):
    stream = await client.completions.create(model="tiny", prompt="p", max_tokens=6, logprobs=0, stream=True)
    offsets = [offset for c in await chunks_of(stream) for offset in (c.choices[0].logprobs or _none()).text_offset]
    assert offsets == list(range(6))


def _none():
    class Empty:
        text_offset = ()

    return Empty


# --- tools and formats ------------------------------------------------------------------------------------------------


async def test_an_automatic_call_is_found_in_the_text(client, emulated_mesh):
    says(emulated_mesh, f"Let me see.\n{CALL}")
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
    prompt = bytes(i for i in memoryview(last_submit(emulated_mesh).token_ids).cast("I") if i < 256).decode()
    assert '"name": "weather"' in prompt


async def test_streamed_calls_have_indices_ids_and_names(client, emulated_mesh):
    says(emulated_mesh, CALL + CALL)
    async with client.chat.completions.stream(model="tiny", messages=HI, tools=[WEATHER]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert events
    calls = final.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert len({call.id for call in calls}) == 2
    assert final.choices[0].finish_reason == "tool_calls"


async def test_one_call_is_enough_without_parallel_calls(client, emulated_mesh):
    says(emulated_mesh, CALL + CALL, ends=False)
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)


async def test_a_named_call_is_confined_by_a_grammar(client, emulated_mesh):
    says(emulated_mesh, '{"city": "Oslo"}')
    answer = await client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert json.loads(last_submit(emulated_mesh).sampling.grammar.text) == WEATHER["function"]["parameters"]


async def test_a_required_call_is_confined_by_a_grammar(client, emulated_mesh):
    says(emulated_mesh, '[{"name": "weather", "arguments": {"city": "Oslo"}}]')
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert answer.choices[0].finish_reason == "tool_calls"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_arguments_are_streamed_as_they_come(client, emulated_mesh, choice):
    arguments = '{"city": "Oslo", "days": [1, 2, 3]}'
    says(emulated_mesh, arguments if choice is NAMED else f'[{{"name": "weather", "arguments": {arguments}}}]')
    asked = {"model": "tiny", "messages": HI, "tools": [WEATHER], "tool_choice": choice}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(deltas) > 10
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "weather")
    assert deltas[0].id
    assert {(delta.index, delta.id, delta.function.name) for delta in deltas[1:]} == {(0, None, None)}
    assert "".join(delta.function.arguments for delta in deltas) == arguments
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == arguments
    assert final.choices[0].finish_reason == "tool_calls"


async def test_calls_before_the_length_limit_are_kept(client, emulated_mesh):
    one = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    says(emulated_mesh, f"[{one}, {one}, {one}]")
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, tools=[WEATHER], tool_choice="required", max_tokens=2 * len(one) + 20
    )
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == ['{"city": "Oslo"}'] * 2
    assert answer.choices[0].finish_reason == "length"


class City(BaseModel):
    name: str


async def test_parse_gives_the_object_of_a_schema(client, emulated_mesh):
    says(emulated_mesh, '{"name": "Bern"}')
    answer = await client.chat.completions.parse(model="tiny", messages=HI, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Bern")
    assert "name" in last_submit(emulated_mesh).sampling.grammar.text


async def test_parse_says_when_the_length_cut_it(client, emulated_mesh):
    says(emulated_mesh, '{"name": "Bern"}')
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(model="tiny", messages=HI, response_format=City, max_tokens=4)


async def test_json_object_format_reaches_the_worker(client, emulated_mesh):
    await client.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=2
    )
    assert last_submit(emulated_mesh).sampling.grammar.kind == 1


# --- models, errors ---------------------------------------------------------------------------------------------------


async def test_models_are_listed_and_found_by_name_and_alias(client):
    models = [model async for model in client.models.list()]
    assert [(model.id, model.object, model.ready) for model in models] == [("tiny", "model", True)]
    assert (await client.models.retrieve("tiny-alias")).id == "tiny"


@pytest.mark.parametrize(
    ("kind", "fields", "param", "code"),
    [
        (openai.NotFoundError, {"model": "nope"}, "model", "model_not_found"),
        (openai.BadRequestError, {"max_tokens": 0}, "max_tokens", "invalid_argument"),
        (openai.BadRequestError, {"temperature": -1}, "temperature", "invalid_argument"),
        (openai.BadRequestError, {"top_logprobs": 2}, "top_logprobs", "invalid_argument"),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_argument"),
        (openai.BadRequestError, {"messages": []}, "messages", "invalid_argument"),
        (openai.BadRequestError, {"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        (openai.BadRequestError, {"audio": {"voice": "x", "format": "mp3"}}, "audio", "unsupported_parameter"),
        (openai.BadRequestError, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_argument"),
        (
            openai.BadRequestError,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
    ],
)
async def test_errors_have_openais_form(client, kind, fields, param, code):
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(**({"model": "tiny", "messages": HI, "max_tokens": 4} | fields))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id
    assert caught.value.body["message"]


async def test_a_failure_in_mid_stream_reaches_the_caller_as_an_error(client, emulated_mesh):
    emulated_mesh.answer = canned(TEXT)
    decode = next(worker for worker in emulated_mesh.fleet.values() if "decode" in worker.instance)
    decode.step_s = 0.05
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=500, stream=True, extra_body={"timeout_s": 3.0}
    )
    with pytest.raises(openai.APIError, match="deadline") as caught:
        await chunks_of(stream)
    assert caught.value.code == "deadline_exceeded"
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)


async def test_placement_is_told_when_asked_for(client, emulated_mesh):
    headers = {"x-tidemill-placement": "1"}
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=HI, max_tokens=4, extra_headers=headers
    )
    placement = json.loads(raw.headers["x-tidemill-placement"])
    assert placement["prefill_instance"].startswith("emulated-prefill")
    assert placement["decode_instance"].startswith("emulated-decode")
    assert placement["degraded"] == "router"
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=4, stream=True, extra_headers=headers
    )
    chunks = await chunks_of(stream)
    assert chunks[-1].placement["decode_instance"].startswith("emulated-decode")


async def test_a_request_id_of_the_caller_is_kept(client):
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=HI, max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id == "chatcmpl-mine-7"


async def test_sync_clients_work_as_well(emulated_mesh):
    def ask():
        with openai.OpenAI(base_url=f"{emulated_mesh.http}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(ask) == TEXT[:8]
