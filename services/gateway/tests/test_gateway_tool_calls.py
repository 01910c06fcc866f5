import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_gateway.grammar import grammar_of
from tidemill_gateway.spec import ChatMessage, GenerationSpec, Tool
from tidemill_gateway.text.tool_calls import HermesParser, NamedCallParser, Parsed, RequiredCallsParser
from tidemill_mesh.errors import MeshError

NAMES = {"weather", "time"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def parse(text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    whole = run(HermesParser(NAMES), text, step)
    return whole.text, [(call.name, call.arguments_json) for call in whole.calls]


def run(parser, text: str, step: int) -> Parsed:
    """Everything that the parser gives; the pieces of complete calls join to them."""
    whole = Parsed()
    for i in range(0, len(text), step):
        whole.append(parser.push(text[i : i + step]))
    whole.append(parser.finish())
    joined = joined_parts(whole)
    assert joined[: len(whole.calls)] == [(call.id, call.name, call.arguments_json) for call in whole.calls]
    return whole


def joined_parts(parsed: Parsed) -> list[tuple[str, str, str]]:
    """As a client does it: the fields of a first piece, arguments of all."""
    joined: list[list[str]] = []
    for part in parsed.parts:
        assert part.index <= len(joined)
        if part.index == len(joined):
            assert part.id
            assert part.name
            joined.append([part.id, part.name, ""])
        else:
            assert (part.id, part.name) == ("", "")
        joined[part.index][2] += part.arguments_json
    return [(one[0], one[1], one[2]) for one in joined]


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
    assert found == [("weather", '{"city": "Rome"}')] * calls


@given(st.text(alphabet="<>/tool_ca \n{}", max_size=40))
def test_text_without_calls_is_unchanged(text):
    if "<tool_call>" not in text:
        assert parse(text, 3) == (text, [])


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_named_tools_output_is_its_arguments(step):
    whole = run(NamedCallParser("time"), ' {"zone": "C E T"} \n', step)
    assert [(c.name, c.arguments_json) for c in whole.calls] == [("time", '{"zone": "C E T"}')]
    assert whole.text == ""


ODD = '{"city": "Os\\"lo}, {[", "days": [1, {"a": "]"}]}'


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_required_calls_come_as_an_array_and_in_pieces(step):
    text = '[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": ' + ODD + "}]"
    whole = run(RequiredCallsParser(NAMES), text, step)
    assert [(c.name, c.arguments_json) for c in whole.calls] == [("time", "{}"), ("weather", ODD)]
    assert whole.text == ""
    if step == 1:
        assert len(whole.parts) > len(ODD)


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_calls_before_a_cut_are_kept(step):
    text = '[{"name": "time", "arguments": {"zone": 1}}, {"name": "weather", "arguments": {"ci'
    whole = run(RequiredCallsParser(NAMES), text, step)
    assert [(c.name, c.arguments_json) for c in whole.calls] == [("time", '{"zone": 1}')]
    assert [arguments for _, _, arguments in joined_parts(whole)] == ['{"zone": 1}', '{"ci']
    assert whole.text == ""


def test_a_cut_before_any_call_shows_the_text():
    assert run(RequiredCallsParser(NAMES), '[{"name": "ti', 1).text == '[{"name": "ti'


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ('"arguments": {"a": 1}, "name": "time"', '{"a": 1}'),
        ('"name": "time", "parameters": {"a": 1}', '{"a": 1}'),
        ('"name": "time"', "{}"),
        ('"name": "time", "arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"x": {"name": "weather"}, "name": "time", "arguments": [1]', "[1]"),
    ],
)
def test_members_may_come_in_any_order_and_form(step, members, arguments):
    _, calls = parse("<tool_call>{" + members + "}</tool_call>", step)
    assert calls == [("time", arguments)]


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.text(max_size=6) | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
    ),
    max_size=3,
)


@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_any_arguments_arrive_whole_in_pieces_of_any_size(all_arguments, step, ascii_only):
    written = [json.dumps(arguments, ensure_ascii=ascii_only) for arguments in all_arguments]
    items = ", ".join('{"name": "time", "arguments": ' + text + "}" for text in written)
    whole = run(RequiredCallsParser(NAMES), f"[{items}]", step)
    assert [call.arguments_json for call in whole.calls] == written


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


@pytest.mark.parametrize("mode", ["required", "named"])
def test_tools_too_deep_to_write_are_refused(mode):
    parameters: dict[str, object] = {}
    for _ in range(5000):
        parameters = {"not": parameters}
    deep = GenerationSpec(model="m", tools=[Tool("deep", "", parameters)], tool_mode=mode, tool_name="deep")
    with pytest.raises(MeshError, match="nested") as caught:
        grammar_of(deep)
    assert caught.value.field == "tools"
