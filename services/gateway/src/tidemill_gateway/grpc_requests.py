"""Public protos to requests and back."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.v1 import inference_pb2 as pb
from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.output import ChoiceOutput
from tidemill_gateway.spec import CalledTool, ChatMessage, FormatKind, GenerationSpec, SamplingSpec, Tool, ToolMode
from tidemill_gateway.text.token_bytes import TokenBytes
from tidemill_gateway.validation import invalid

_TOOL_MODES: dict[int, ToolMode] = {
    pb.ToolChoice.MODE_UNSPECIFIED: "auto",
    pb.ToolChoice.MODE_AUTO: "auto",
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
    pb.ToolChoice.MODE_NAMED: "named",
}
_FORMATS: dict[int, FormatKind] = {
    pb.ResponseFormat.TYPE_UNSPECIFIED: "text",
    pb.ResponseFormat.TYPE_TEXT: "text",
    pb.ResponseFormat.TYPE_JSON_OBJECT: "json_object",
    pb.ResponseFormat.TYPE_JSON_SCHEMA: "json_schema",
}
_FINISHES = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
)


def to_spec(request: pb.GenerateRequest, traceparent: str) -> GenerationSpec:
    """The request in the gateway's form; INVALID_ARGUMENT for enum values that are none."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "text, chat or token_ids must be set")
    prompts: list[str | list[int]] = []
    if kind == "text":
        prompts = [request.text]
    elif kind == "token_ids":
        prompts = [list(request.token_ids.ids)]
    return GenerationSpec(
        request_id=request.request_id,
        model=request.model,
        chat=to_messages(request.chat) if kind == "chat" else None,
        prompts=prompts,
        prompt_field="messages" if kind == "chat" else kind,
        sampling=_sampling(request.sampling),
        sampling_prefix="sampling.",
        priority=request.priority,
        slo_ttft_s=request.slo.ttft_s,
        slo_tpot_s=request.slo.tpot_s,
        program_id=request.program_id,
        timeout_s=request.timeout_s,
        response_format=_known("response_format.type", _FORMATS, request.response_format.type),
        json_schema=request.response_format.json_schema,
        tools=[_tool(i, tool) for i, tool in enumerate(request.tools)],
        tool_mode=_known("tool_choice.mode", _TOOL_MODES, request.tool_choice.mode),
        tool_name=request.tool_choice.name,
        include_placement=request.include_placement,
        traceparent=traceparent,
    )


def to_messages(chat: pb.ChatInput) -> list[ChatMessage]:
    """Chat messages in the gateway's form."""
    return [
        ChatMessage(
            role=message.role,
            content=message.content,
            name=message.name,
            tool_calls=tuple(CalledTool(c.id, c.name, c.arguments_json) for c in message.tool_calls),
            tool_call_id=message.tool_call_id,
        )
        for message in chat.messages
    ]


def _known(field: str, names: dict[int, Any], value: int) -> Any:
    if value not in names:
        raise invalid(field, f"{value} is not a value of this enum")
    return names[value]


def _sampling(given: pb.SamplingParams) -> SamplingSpec:
    present: dict[str, Any] = {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}  # type: ignore[arg-type]
    return SamplingSpec(
        logit_bias=dict(given.logit_bias),
        stop=list(given.stop),
        stop_token_ids=list(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        logprobs=given.logprobs,
        top_logprobs=given.top_logprobs,
        **present,
    )


def _tool(i: int, tool: pb.Tool) -> Tool:
    try:
        parameters = json.loads(tool.parameters_json or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"tools[{i}].parameters_json", f"is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise invalid(f"tools[{i}].parameters_json", "must be a JSON schema: an object")
    return Tool(tool.name, tool.description, parameters, tool.strict)


def to_response(request: LiveRequest, batch: Iterable[ChoiceOutput]) -> pb.GenerateResponse:
    """One message of the stream."""
    token_bytes = request.model.token_bytes
    response = pb.GenerateResponse(request_id=request.request_id, model=request.model.display_name)
    for output in batch:
        delta = response.choices.add(
            index=output.index, text=output.text, token_ids=output.token_ids, stop_string=output.stop_string
        )
        if output.logprobs:
            delta.logprobs.extend(_logprobs(output, token_bytes))
        if output.finish is not None:
            delta.finish_reason = _FINISHES[output.finish]
        for call in output.tool_calls:
            delta.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments_json)
    return response


def _logprobs(output: ChoiceOutput, token_bytes: TokenBytes) -> Sequence[pb.TokenLogprob]:
    shown = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        top = [
            pb.TopLogprob(token_id=other, logprob=value, token=token_bytes.display_bytes(other))
            for other, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        token = token_bytes.display_bytes(token_id)
        shown.append(pb.TokenLogprob(token_id=token_id, logprob=entry.logprob, token=token, top=top))
    return shown


def add_last_fields(response: pb.GenerateResponse, request: LiveRequest) -> None:
    """Usage and timing, which only the last message carries, and the placement if it was asked for."""
    usage, times = request.usage(), request.times()
    response.usage.CopyFrom(
        pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens_l1=usage.cached_l1,
            cached_tokens_l2=usage.cached_l2,
            cached_tokens_l3=usage.cached_l3,
        )
    )
    response.timing.CopyFrom(pb.Timing(queue_s=times.queue_s, ttft_s=times.ttft_s, total_s=times.total_s))
    if request.prepared.spec.include_placement:
        response.placement.CopyFrom(to_placement(request))


def to_placement(request: LiveRequest) -> pb.Placement:
    """Where the request ran."""
    placement = request.placement
    return pb.Placement(
        prefill_instance=placement.prefill_instance,
        decode_instance=placement.decode_instance,
        attempts=request.generation.attempts,
        prefill_terms=placement.prefill_terms,
        decode_terms=placement.decode_terms,
        degraded=placement.degraded,
    )
