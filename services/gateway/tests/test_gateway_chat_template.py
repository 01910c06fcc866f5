import pytest
from gateway_emulated import CHAT_TEMPLATE, byte_tokenizer, tiny_assets

from tidemill.v1 import errors_pb2
from tidemill_gateway.models.served_model import load_model
from tidemill_gateway.spec import CalledTool, ChatMessage, Tool
from tidemill_gateway.text.chat_template import ChatTemplate, TemplateRefused, special_tokens
from tidemill_mesh.errors import MeshError

HI = [{"role": "user", "content": "hi"}]
TOOL = Tool("weather", "Tells it.", {"type": "object"})
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE


def test_a_template_asks_for_the_assistants_turn():
    rendered = ChatTemplate(CHAT_TEMPLATE, {}).render(HI)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{{ {'é': [1, true, none]} | tojson }}", '{"é": [1, true, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}end", "end"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_hugging_face_conventions_hold(source, shown):
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(HI) == shown


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_refuses_or_breaks_on_is_the_callers_error(source):
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render(HI)


def test_special_tokens_may_be_objects():
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def model(template: str):
    return load_model(tiny_assets().card, byte_tokenizer().to_str().encode(), template.encode(), b"{}")


def test_a_template_that_takes_tools_gets_them_in_openais_form():
    prompt = model(WITH_TOOLS).chat_prompt([ChatMessage("user", "hi")], [TOOL])
    assert prompt.startswith('[{"type": "function", "function": {"name": "weather"')


def test_another_template_gets_them_in_the_system_message():
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
    prompt = model(CHAT_TEMPLATE).chat_prompt(messages, [TOOL])
    assert prompt.startswith("<|im_start|>system\nbe brief\n\n# Tools")
    assert '"name": "weather"' in prompt


def test_a_template_that_takes_tools_sees_calls_as_values():
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    source = "{% for m in messages %}" + calls + "{% endfor %}{{ tools }}"
    call = CalledTool("c1", "weather", '{"city": "Rome"}')
    assert "Rome" in model(source).chat_prompt([ChatMessage("assistant", "", "", (call,))], [TOOL])


def test_a_model_without_a_template_takes_no_messages():
    with pytest.raises(MeshError) as caught:
        model("").chat_prompt([ChatMessage("user", "hi")], [])
    assert caught.value.code == errors_pb2.ERROR_CODE_UNSUPPORTED


def test_a_refusing_template_is_an_invalid_argument():
    with pytest.raises(MeshError, match="no system") as caught:
        model("{{ raise_exception('no system messages') }}").chat_prompt([ChatMessage("user", "hi")], [])
    assert caught.value.field == "messages"


WITH_CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ tools }}"
)


def called(arguments_json: str) -> list[ChatMessage]:
    return [ChatMessage("assistant", "", "", (CalledTool("c1", "weather", arguments_json),))]


def test_arguments_too_deep_to_parse_stay_text():
    deep = "[" * 100_000
    assert model(WITH_CALLS).chat_prompt(called(deep), []) == f'"{deep}"None'


@pytest.mark.parametrize("depth", [900, 940, 980, 1000])
def test_arguments_that_can_be_parsed_but_not_written_are_the_callers_error(depth):
    refused = None
    try:
        model(WITH_CALLS).chat_prompt(called("[" * depth + "]" * depth), [])
    except MeshError as error:
        refused = error
    assert refused is None or refused.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT


def test_a_lone_surrogate_is_named_whatever_brought_it():
    for template, tools in ((WITH_CALLS, []), (CHAT_TEMPLATE, [Tool("weather", "", {"title": "\ud800"})])):
        with pytest.raises(MeshError, match="lone surrogate") as caught:
            model(template).chat_prompt(called('"\\ud800"'), tools)
        assert caught.value.field == "messages"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_TOOLS])
def test_tools_too_deep_to_write_are_the_callers_error(template):
    parameters: dict[str, object] = {}
    for _ in range(5000):
        parameters = {"not": parameters}
    with pytest.raises(MeshError) as caught:
        model(template).chat_prompt([ChatMessage("user", "hi")], [Tool("weather", "", parameters)])
    assert caught.value.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
