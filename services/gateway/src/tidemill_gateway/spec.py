"""What a caller asks for, in one form for both APIs: types are right, values are not yet checked."""

from dataclasses import dataclass, field
from typing import Any, Literal

ToolMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["text", "json_object", "json_schema"]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call that an earlier assistant message made."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(slots=True, kw_only=True)
class SamplingSpec:
    """None: the model's generation default, else the default in the proto."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    n: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(slots=True, kw_only=True)
class GenerationSpec:
    """One request. Either `chat` or `prompts` (texts or token ids) is the input."""

    request_id: str = ""
    model: str = ""
    chat: list[ChatMessage] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    prompt_field: str = "text"
    """What the caller calls the input, for error messages."""
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    sampling_prefix: str = ""
    """Path before the names of sampling fields, for error messages."""
    priority: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    program_id: str = ""
    timeout_s: float = 0.0
    response_format: FormatKind = "text"
    json_schema: str = ""
    tools: list[Tool] = field(default_factory=list)
    tool_mode: ToolMode = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    include_placement: bool = False
    traceparent: str = ""
