"""Builds the messages of the public contract from plain Python values; what cannot be built names its field."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf import message as protobuf

from tidemill.errors import TidemillError
from tidemill.v1 import errors_pb2, inference_pb2

Message = inference_pb2.ChatMessage | Mapping[str, Any]
M = TypeVar("M", bound=protobuf.Message)


class GenerateOptions(TypedDict, total=False):
    """Everything of a request besides model and input; absent fields take the model's defaults."""

    request_id: str
    priority: int
    program_id: str
    timeout_s: float
    ttft_s: float
    tpot_s: float
    include_placement: bool
    json_object: bool
    json_schema: str
    tools: Sequence[inference_pb2.Tool | Mapping[str, Any]]
    tool_choice: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: bool
    top_logprobs: int


_PLAIN = ("request_id", "priority", "program_id", "timeout_s", "include_placement")
_SAMPLING = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_TOOL_MODES = {
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def generate_request(
    model: str,
    *,
    text: str | None = None,
    messages: Sequence[Message] | None = None,
    token_ids: Sequence[int] | None = None,
    **options: Unpack[GenerateOptions],
) -> inference_pb2.GenerateRequest:
    """A GenerateRequest with one of text, messages and token_ids; TidemillError names a field with a wrong value."""
    given: dict[str, Any] = dict(options)
    fields: dict[str, Any] = {name: given.pop(name) for name in _PLAIN if name in given}
    sampling: dict[str, Any] = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    fields["sampling"] = _build(inference_pb2.SamplingParams, "sampling", sampling)
    slo: dict[str, Any] = {name: given.pop(name) for name in ("ttft_s", "tpot_s") if name in given}
    if slo:
        fields["slo"] = _build(inference_pb2.SloTargets, "slo", slo)
    fields |= _output_shape(given)
    if given:
        raise TypeError(f"unknown option {', '.join(sorted(given))}")
    fields |= input_fields(text=text, messages=messages, token_ids=token_ids)
    return _build(inference_pb2.GenerateRequest, "", {"model": model, **fields})


def input_fields(
    *, text: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """The `input` of a request, which must be exactly one."""
    given = [
        name for name, value in (("text", text), ("messages", messages), ("token_ids", token_ids)) if value is not None
    ]
    if len(given) != 1:
        raise TypeError(f"give exactly one of text, messages and token_ids, not {' and '.join(given) or 'none'}")
    if text is not None:
        return {"text": text}
    if messages is not None:
        return {"chat": inference_pb2.ChatInput(messages=[_message(i, item) for i, item in enumerate(messages)])}
    return {"token_ids": _build(inference_pb2.TokenIds, "token_ids", {"ids": token_ids})}


def _message(index: int, item: Message) -> inference_pb2.ChatMessage:
    if isinstance(item, inference_pb2.ChatMessage):
        return item
    return _build(inference_pb2.ChatMessage, f"chat.messages[{index}]", dict(item))


def _output_shape(given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    schema = given.pop("json_schema", None)
    if schema is not None:
        kind = inference_pb2.ResponseFormat.TYPE_JSON_SCHEMA
        fields["response_format"] = _build(
            inference_pb2.ResponseFormat, "response_format", {"type": kind, "json_schema": schema}
        )
    elif given.pop("json_object", False):
        fields["response_format"] = inference_pb2.ResponseFormat(type=inference_pb2.ResponseFormat.TYPE_JSON_OBJECT)
    if (tools := given.pop("tools", None)) is not None:
        fields["tools"] = [
            tool if isinstance(tool, inference_pb2.Tool) else _build(inference_pb2.Tool, f"tools[{index}]", dict(tool))
            for index, tool in enumerate(tools)
        ]
    if (choice := given.pop("tool_choice", None)) is not None:
        mode = _TOOL_MODES.get(choice, inference_pb2.ToolChoice.MODE_NAMED)
        name = "" if choice in _TOOL_MODES else choice
        fields["tool_choice"] = _build(inference_pb2.ToolChoice, "tool_choice", {"mode": mode, "name": name})
    return fields


def _build(kind: type[M], path: str, fields: Mapping[str, Any]) -> M:
    """A message set field by field, so that the error names the field."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            where = f"{path}.{name}" if path else name
            raise TidemillError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"{where}: {error}", field=where) from None
    return message
