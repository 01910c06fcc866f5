"""The body of /v1/chat/completions to a request."""

import json
from typing import Any

from tidemill_gateway.http.json_fields import Fields
from tidemill_gateway.http.request_body import (
    IGNORED,
    UNSUPPORTED,
    StreamOptions,
    fill_scheduling,
    refuse_unsupported,
    sampling,
    stream_options,
)
from tidemill_gateway.spec import CalledTool, ChatMessage, GenerationSpec, Tool
from tidemill_gateway.validation import invalid, unsupported

_UNSUPPORTED = UNSUPPORTED | {
    "audio": lambda _: False,
    "modalities": lambda value: value == ["text"],
    "prediction": lambda _: False,
    "web_search_options": lambda _: False,
    "functions": lambda value: value == [],
    "function_call": lambda value: value == "none",
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "echo": lambda value: value is False,
    "add_generation_prompt": lambda value: value is True,
    "continue_final_message": lambda value: value is False,
    "chat_template": lambda _: False,
    "chat_template_kwargs": lambda value: value == {},
    "documents": lambda value: value == [],
}


def parse_chat(body: dict[str, Any]) -> tuple[GenerationSpec, StreamOptions, list[str]]:
    """The request, how to send its answer, and the names of unknown fields."""
    fields = Fields(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    for name in IGNORED:
        fields.take(name)
    options = stream_options(fields)
    spec = GenerationSpec(model=fields.text("model") or "", prompt_field="messages")
    spec.chat = [_message(message) for message in fields.objects("messages")]
    spec.sampling = sampling(fields)
    limit = fields.integer("max_completion_tokens")
    if limit is not None:
        spec.sampling.max_tokens = limit
    spec.sampling.logprobs = fields.boolean("logprobs")
    spec.sampling.top_logprobs = fields.integer("top_logprobs") or 0
    _response_format(spec, fields)
    spec.tools = [_tool(tool) for tool in fields.objects("tools")]
    _tool_choice(spec, fields.take("tool_choice"))
    spec.parallel_tool_calls = fields.boolean("parallel_tool_calls", default=True)
    fill_scheduling(spec, fields)
    return spec, options, fields.unknown()


def _message(fields: Fields) -> ChatMessage:
    role = fields.text("role") or ""
    calls = tuple(_called_tool(call) for call in fields.objects("tool_calls"))
    content = _content(fields, fields.take("content"), may_be_null=role == "assistant")
    shown = "system" if role == "developer" else role
    return ChatMessage(shown, content, fields.text("name") or "", calls, fields.text("tool_call_id") or "")


def _content(fields: Fields, value: Any, *, may_be_null: bool) -> str:
    path = fields.path("content")
    if isinstance(value, str):
        return value
    if value is None and may_be_null:
        return ""
    if not isinstance(value, list):
        raise invalid(path, "must be a string or an array of content parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise invalid(f"{path}[{i}]", "must be an object")
        if part.get("type") != "text":
            raise unsupported(f"{path}[{i}].type", f"content of type {str(part.get('type'))[:32]!r} is not supported")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{path}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _called_tool(fields: Fields) -> CalledTool:
    function = Fields(fields.object("function") or {}, fields.path("function."))
    name = function.text("name")
    if not name:
        raise invalid(function.path("name"), "must not be empty")
    return CalledTool(fields.text("id") or "", name, function.text("arguments") or "{}")


def _tool(fields: Fields) -> Tool:
    kind = fields.text("type")
    if kind != "function":
        raise unsupported(fields.path("type"), f"tools of type {str(kind)[:32]!r} are not supported")
    function = Fields(fields.object("function") or {}, fields.path("function."))
    return Tool(
        name=function.text("name") or "",
        description=function.text("description") or "",
        parameters=function.object("parameters") or {},
        strict=function.boolean("strict"),
    )


def _tool_choice(spec: GenerationSpec, value: Any) -> None:
    if value is None:
        return
    if value in ("auto", "none", "required"):
        spec.tool_mode = value
        return
    if not isinstance(value, dict):
        raise invalid("tool_choice", "must be auto, none, required or a named function")
    choice = Fields(value, "tool_choice.")
    kind = choice.text("type")
    if kind != "function":
        raise unsupported("tool_choice.type", f"{str(kind)[:32]!r} is not supported")
    function = Fields(choice.object("function") or {}, "tool_choice.function.")
    spec.tool_mode = "named"
    spec.tool_name = function.text("name") or ""


def _response_format(spec: GenerationSpec, fields: Fields) -> None:
    given = fields.object("response_format")
    if given is None:
        return
    form = Fields(given, "response_format.")
    kind = form.text("type")
    if kind in ("text", "json_object"):
        spec.response_format = "text" if kind == "text" else "json_object"
    elif kind == "json_schema":
        spec.response_format = "json_schema"
        named = Fields(form.object("json_schema") or {}, "response_format.json_schema.")
        schema = named.object("schema")
        if schema is None:
            raise invalid("response_format.json_schema.schema", "must be an object")
        spec.json_schema = json.dumps(schema)
    else:
        raise unsupported("response_format.type", f"{str(kind)[:32]!r} is not supported")
