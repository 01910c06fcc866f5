import asyncio
import json
import random
from dataclasses import replace

import pytest
from gateway_emulated import byte_tokenizer, tiny_assets
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidemill.v1 import errors_pb2
from tidemill.v1 import inference_pb2 as pb
from tidemill_gateway.grpc_requests import to_spec
from tidemill_gateway.http.chat_body import parse_chat
from tidemill_gateway.http.completion_body import parse_completion
from tidemill_gateway.intake import prepare
from tidemill_gateway.models.served_model import PIECE_CHARS, load_model
from tidemill_gateway.spec import GenerationSpec, SamplingSpec, Tool
from tidemill_gateway.validation import Limits, ModelLimits, check_request
from tidemill_mesh.errors import MeshError

LIMITS = Limits(max_timeout_s=3600.0, max_prompts=64, max_choices=128)
MODEL_LIMITS = ModelLimits("tiny", 1024, 264, 4096)
_ASSETS = tiny_assets()
MODEL = load_model(_ASSETS.card, byte_tokenizer().to_str().encode(), b"{{ messages[0].content }}", b"{}")


def admit(spec: GenerationSpec) -> None:
    check_request(spec, LIMITS)
    asyncio.run(prepare(spec, MODEL, MODEL_LIMITS, b"salt", 4096))


def refusal(spec: GenerationSpec) -> MeshError:
    with pytest.raises(MeshError) as caught:
        admit(spec)
    return caught.value


def completion(**fields) -> GenerationSpec:
    return parse_completion({"model": "tiny", "prompt": "hi"} | fields)[0]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -5, "max_tokens"),
        ("max_tokens", 1e30, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("temperature", float("inf"), "temperature"),
        ("temperature", 2.01, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("seed", 1 << 63, "seed"),
        ("n", 0, "n"),
        ("n", 17, "n"),
        ("stop", [None], "stop"),
        ("stop", [""], "stop"),
        ("stop", ["x" * 257], "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("stop_token_ids", [None], "stop_token_ids[0]"),
        ("stop_token_ids", [264], "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("logit_bias", {"264": 1}, "logit_bias"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {"1": None}, "logit_bias.1"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
        ("min_tokens", 30, "min_tokens"),
        ("logprobs", 21, "logprobs"),
        ("priority", 101, "priority"),
        ("timeout_s", -1, "timeout_s"),
        ("timeout_s", 1e9, "timeout_s"),
        ("prompt", "", "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", ["a", ""], "prompt"),
        ("prompt", ["a", 1], "prompt"),
        ("prompt", [264], "prompt"),
        ("prompt", [None], "prompt[0]"),
        ("prompt", None, "prompt"),
        ("model", "", "model"),
        ("model", 5, "model"),
        ("stream_options", {"include_usage": True}, "stream_options"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value, named):
    with pytest.raises(MeshError) as caught:
        admit(completion(**({"max_tokens": 20} | {field: value})))
    assert caught.value.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.field == named


@pytest.mark.parametrize("field", ["echo", "suffix", "guided_json", "use_beam_search", "store", "prompt_logprobs"])
def test_a_known_but_unsupported_field_is_refused_by_name(field):
    with pytest.raises(MeshError) as caught:
        completion(**{field: "text" if field == "suffix" else True})
    assert (caught.value.code, caught.value.field) == (errors_pb2.ERROR_CODE_UNSUPPORTED, field)


def chat(**fields) -> GenerationSpec:
    return parse_chat({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields)[0]


def function(name: str = "f") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


OBJECT = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"response_format": {"type": "xml"}}, "UNSUPPORTED", "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "UNSUPPORTED", "response_format.type"),
        ({"response_format": "json_object"}, "INVALID_ARGUMENT", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "INVALID_ARGUMENT", "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "INVALID_ARGUMENT",
            "response_format.json_schema.schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "UNSUPPORTED", "tools[0].type"),
        ({"tools": [function(), {"type": "custom"}]}, "UNSUPPORTED", "tools[1].type"),
        ({"tools": [function("no spaces")]}, "INVALID_ARGUMENT", "tools[0].name"),
        ({"tools": [function(), function()]}, "INVALID_ARGUMENT", "tools"),
        ({"tools": [function()], "tool_choice": "sometimes"}, "INVALID_ARGUMENT", "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "allowed_tools"}}, "UNSUPPORTED", "tool_choice.type"),
        ({"tools": [function()], "tool_choice": function("g")}, "INVALID_ARGUMENT", "tool_choice"),
        ({"tool_choice": "required"}, "INVALID_ARGUMENT", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "UNSUPPORTED", "functions"),
        ({"function_call": "auto"}, "UNSUPPORTED", "function_call"),
        (
            {"tools": [function()], "tool_choice": "required", "response_format": OBJECT},
            "UNSUPPORTED",
            "response_format",
        ),
        (
            {"tools": [function()], "tool_choice": function(), "response_format": SCHEMA},
            "UNSUPPORTED",
            "response_format",
        ),
        ({"tools": [function()], "response_format": OBJECT}, "UNSUPPORTED", "response_format"),
        ({"tools": [function()], "tool_choice": "auto", "response_format": SCHEMA}, "UNSUPPORTED", "response_format"),
    ],
)
def test_tools_and_formats_that_do_not_work_are_refused_by_field(fields, code, named):
    with pytest.raises(MeshError) as caught:
        admit(chat(**fields))
    assert (errors_pb2.ErrorCode.Name(caught.value.code), caught.value.field) == (f"ERROR_CODE_{code}", named)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [function()]},
        {"tools": [function()], "tool_choice": "none", "response_format": OBJECT},
        {"tools": [], "response_format": SCHEMA},
        {"tools": [function(), function("g")], "tool_choice": function("g")},
        {"tools": [function()], "response_format": {"type": "text"}},
        {"functions": [], "function_call": "none", "tools": None, "tool_choice": None, "response_format": None},
    ],
)
def test_tools_and_formats_that_work_are_taken(fields):
    admit(chat(**fields))


def test_by_grpc_too_a_format_that_forbids_every_call_is_refused():
    request = pb.GenerateRequest(model="tiny", chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")]))
    request.tools.add(name="f")
    admit(to_spec(request, ""))
    request.response_format.type = pb.ResponseFormat.TYPE_JSON_OBJECT
    error = refusal(to_spec(request, ""))
    assert (error.code, error.field) == (errors_pb2.ERROR_CODE_UNSUPPORTED, "response_format")


def test_unknown_fields_are_reported_not_refused():
    assert parse_completion({"model": "m", "prompt": "p", "banana": 1})[2] == ["banana"]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(1023, 1, True), (1023, None, True), (1023, 2, False), (1024, None, False), (1025, None, False), (1, 1023, True),
     (1, 1024, False)],
)  # fmt: skip
def test_prompt_and_output_must_fit_the_context(prompt_tokens, max_tokens, fits):
    spec = completion(prompt=[65] * prompt_tokens, max_tokens=max_tokens)
    if fits:
        admit(spec)
        return
    error = refusal(spec)
    assert error.code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG
    assert error.limit == "1024 tokens"


def test_limits_are_numbers_that_a_caller_may_copy():
    assert refusal(completion(max_tokens=1 << 40)).limit == "[1..2147483647]"
    assert refusal(completion(seed=1 << 63)).limit == f"[{-(1 << 63)}..{(1 << 63) - 1}]"
    assert refusal(completion(top_p=1.5)).limit == "(0..1]"


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self) -> None:
        self.chars = 0

    def encode_batch_fast(self, texts, **options):
        self.chars += sum(map(len, texts))
        return MODEL.tokenizer.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("longest_token_chars", [MODEL.longest_token_chars, 0], ids=["by length", "by a piece"])
@pytest.mark.parametrize("spec", [completion(prompt="x" * (4 << 20)), completion(prompt=["a", "é" * (4 << 20)])])
def test_a_text_of_far_too_many_tokens_is_refused_before_it_is_tokenised(spec, longest_token_chars):
    tokenizer = Counting()
    model = replace(MODEL, tokenizer=tokenizer, words=None, longest_token_chars=longest_token_chars)
    model.tokenizer.encode = MODEL.tokenizer.encode
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepare(spec, model, MODEL_LIMITS, b"salt", 4096))
    assert caught.value.code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG
    assert (caught.value.field, caught.value.limit) == ("prompt", "1024 tokens")
    assert tokenizer.chars <= 1024 * PIECE_CHARS


def test_a_long_text_of_few_tokens_is_not_refused_by_its_length():
    model = replace(MODEL, longest_token_chars=64)
    assert asyncio.run(model.encode_within("x" * 20_000, 20_000, add_special_tokens=False)) == [ord("x")] * 20_000


def test_a_request_must_fit_the_largest_pool():
    spec = completion(prompt=[65] * 100, max_tokens=50)
    with pytest.raises(MeshError, match="pool") as caught:
        asyncio.run(prepare(spec, MODEL, ModelLimits("tiny", 1024, 264, 128), b"", 4096))
    assert caught.value.code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG


def test_seeds_of_choices_differ_and_the_first_is_the_callers():
    prepared = asyncio.run(prepare(completion(seed=7, n=3), MODEL, MODEL_LIMITS, b"", 16))
    seeds = [choice.sampling.seed for choice in prepared.choices]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_model_defaults_fill_what_a_request_leaves_open():
    card = tiny_assets(generation_config_json=json.dumps({"temperature": 0.25, "top_k": 5, "top_p": 7})).card
    model = load_model(card, byte_tokenizer().to_str().encode(), b"", b"")
    prepared = asyncio.run(prepare(completion(top_k=3), model, MODEL_LIMITS, b"", 16))
    sampling = prepared.choices[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 3, 1.0)


@pytest.mark.parametrize(
    ("choice", "names", "named"),
    [("none", [], ""), ("auto", ["f", "g"], ""), ({"type": "function", "function": {"name": "g"}}, ["f", "g"], "g")],
)
def test_what_is_prepared_keeps_of_its_spec_only_what_the_answer_needs(choice, names, named):
    function = {"description": "long", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": function | {"name": name}} for name in ("f", "g")]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    spec = parse_chat(body)[0]
    spec.json_schema = "of no use to a format of text"
    spec.tool_name = spec.tool_name or "unknown"
    admit(spec)
    assert (spec.chat, spec.json_schema) == (None, "")
    assert (spec.tools, spec.tool_name) == ([Tool(name) for name in names], named)


def test_a_prompt_is_not_kept_beside_its_tokens():
    spec = completion()
    admit(spec)
    assert spec.prompts == []


# --- fuzz: whatever comes in, only MeshError comes out ----------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, 2, -1, 5, 263, 264, 1024, 1 << 31, 1 << 63]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["", "auto", "none", "required", "function", "user", "assistant", "text", "json_object"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "priority",
    "slo_ttft_s",
    "slo_tpot_s",
    "program_id",
    "timeout_s",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "echo",
    "suffix",
    "best_of",
    "user",
    "store",
    "metadata",
    "banana",
]
MESSAGE_FIELDS = st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"])
MESSAGES = st.lists(st.dictionaries(MESSAGE_FIELDS, VALUES, max_size=4), max_size=3)
FUNCTIONS = st.dictionaries(st.sampled_from(["name", "description", "parameters", "strict"]), VALUES, max_size=4)
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function")}, optional={"function": FUNCTIONS}), max_size=2)


def body_of(base, more, messages, tools):
    given_messages = {} if messages is None else {"messages": messages}
    return base | more | given_messages | ({"tools": tools} if tools else {})


BODIES = st.builds(
    body_of,
    st.sampled_from([{}, {"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.none() | MESSAGES,
    st.none() | TOOLS,
)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LOOP = asyncio.new_event_loop()


def survives(make) -> None:
    refused = None
    try:
        spec = make()
        check_request(spec, LIMITS)
        LOOP.run_until_complete(prepare(spec, MODEL, MODEL_LIMITS, b"salt", 64))
    except MeshError as error:
        refused = error
    assert refused is None or refused.to_detail().message


@MANY
@given(BODIES)
@example({"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "\x00"}]}]})
def test_any_chat_body_is_served_or_refused(body):
    survives(lambda: parse_chat(body)[0])


@MANY
@given(BODIES)
def test_any_completion_body_is_served_or_refused(body):
    survives(lambda: parse_completion(body)[0])


NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 263, 264, 1 << 20, (1 << 31) - 1, -(1 << 31)])
REALS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def sampling_protos() -> st.SearchStrategy[pb.SamplingParams]:
    integers = dict.fromkeys(("max_tokens", "min_tokens", "top_k", "n", "top_logprobs", "seed"), NUMBERS)
    reals = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), REALS)
    lists = {
        "logit_bias": st.dictionaries(st.integers(0, (1 << 32) - 1), REALS, max_size=3),
        "stop": st.lists(st.text(max_size=4), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, (1 << 32) - 1), max_size=3),
        "logprobs": st.booleans(),
    }
    fields = integers | reals | lists
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: pb.SamplingParams(**given))


@MANY
@given(
    sampling_protos(),
    st.sampled_from(["", "a", "x" * 2000]),
    st.lists(st.integers(0, 300), max_size=4),
    st.integers(-5, 5),
    st.floats(allow_nan=True),
)
def test_any_proto_is_served_or_refused(sampling, text, ids, mode, timeout_s):
    request = pb.GenerateRequest(model="tiny", sampling=sampling, timeout_s=timeout_s, priority=mode * 50)
    if ids:
        request.token_ids.ids.extend(ids)
    elif text:
        request.text = text
    request.tool_choice.mode = abs(mode)
    request.response_format.type = abs(mode)
    survives(lambda: to_spec(request, ""))


def test_ten_thousand_random_bodies_are_served_or_refused():
    chance = random.Random(7)
    values = [None, True, 0, 1, -1, 7, 264, 1 << 40, 0.5, float("nan"), float("-inf"), "", "x", "😀", [], {},
              [None], [0], ["a", None], {"a": None}, {"5": 1e9}, [[]], [[1, None]], {"type": "function"},
              {"type": "json_schema", "json_schema": {"schema": {}}}, [{"role": "user"}]]  # fmt: skip
    for number in range(10_000):
        body = {"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        for _ in range(chance.randint(1, 4)):
            body[chance.choice(FIELDS)] = chance.choice(values)
        parse = parse_chat if number % 2 else parse_completion
        survives(lambda parse=parse, body=body: parse(body)[0])


def test_generation_defaults_never_fill_what_is_set():
    spec = completion(temperature=0)
    assert spec.sampling.temperature == 0
    assert SamplingSpec().temperature is None
