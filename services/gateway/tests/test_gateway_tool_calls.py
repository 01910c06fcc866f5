import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_gateway.grammar import grammar_of
from tidemill_gateway.spec import ChatMessage, GenerationSpec, Tool
from tidemill_gateway.text.tool_calls import HermesParser, WholeOutputParser

NAMES = {"weather", "time"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def parse(text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    parser = HermesParser(NAMES)
    parts = [parser.push(text[i : i + step]) for i in range(0, len(text), step)] + [parser.finish()]
    calls = [(call.name, call.arguments_json) for part in parts for call in part.calls]
    return "".join(part.text for part in parts), calls


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", 0),
        (CALL, "", 1),
        (f"Let me look.\n{CALL}", "Let me look.", 1),
        (f"{CALL}\n{CALL}\n", "", 2),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ("a < b and <tool_cal is no tag", "a < b and <tool_cal is no tag", 0),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", 0),
        ('<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', 0),
        ("trailing space ", "trailing space ", 0),
    ],
)
def test_calls_are_found_wherever_the_text_is_cut(step, text, content, calls):
    shown, found = parse(text, step)
    assert shown == content
    assert found == [("weather", '{"city":"Rome"}')] * calls


@given(st.text(alphabet="<>/tool_ca \n{}", max_size=40))
def test_text_without_calls_is_unchanged(text):
    if "<tool_call>" not in text:
        assert parse(text, 3) == (text, [])


def test_a_named_tools_output_is_its_arguments():
    parser = WholeOutputParser(NAMES, "time")
    parser.push('{"zone"')
    parser.push(': "CET"}')
    assert [(c.name, c.arguments_json) for c in parser.finish().calls] == [("time", '{"zone": "CET"}')]


def test_required_calls_come_as_an_array():
    parser = WholeOutputParser(NAMES)
    parser.push('[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]')
    assert [c.name for c in parser.finish().calls] == ["time", "weather"]


def spec(**fields) -> GenerationSpec:
    tools = [Tool("weather", "", {"type": "object", "properties": {"city": {"type": "string"}}}), Tool("time")]
    return GenerationSpec(model="m", chat=[ChatMessage("user", "hi")], tools=tools, **fields)


def test_a_required_call_is_confined_by_a_schema_of_all_tools():
    schema = json.loads(grammar_of(spec(tool_mode="required")).text)
    assert schema["type"] == "array"
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["weather", "time"]
    one_call = json.loads(grammar_of(spec(tool_mode="required", parallel_tool_calls=False)).text)
    assert "anyOf" in one_call


def test_a_named_call_is_confined_by_that_tools_schema():
    schema = json.loads(grammar_of(spec(tool_mode="named", tool_name="weather")).text)
    assert schema["properties"] == {"city": {"type": "string"}}


def test_equal_grammars_have_equal_digests():
    assert grammar_of(spec(tool_mode="required")).digest == grammar_of(spec(tool_mode="required")).digest
