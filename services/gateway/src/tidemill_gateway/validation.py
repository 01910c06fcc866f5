"""Every check of a request's values, for both APIs: the field, what it may be, and one error code."""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from tidemill.v1 import errors_pb2
from tidemill_gateway.spec import GenerationSpec, SamplingSpec, Tool
from tidemill_mesh.errors import MeshError

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_CHOICES_EACH = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_NAME_BYTES = 256
MAX_SLO_S = 86400.0
INT64 = (-(1 << 63), (1 << 63) - 1)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_\-.]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the deployment allows."""

    max_timeout_s: float
    max_prompts: int
    max_choices: int


def invalid(field: str, message: str, limit: str = "") -> MeshError:
    """The error of a wrong value."""
    return MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"{field}: {message}", field=field, limit=limit)


def unsupported(field: str, message: str) -> MeshError:
    """The error of a known field that this deployment does not offer."""
    return MeshError(errors_pb2.ERROR_CODE_UNSUPPORTED, f"{field}: {message}", field=field)


def check_number(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    """Refuses what is outside low..high; NaN is outside of everything."""
    if not (low <= value <= high) or (above_low and value == low):
        limit = f"{'(' if above_low else '['}{_plain(low)}..{_plain(high)}]"
        raise invalid(field, f"must be in {limit}, got {value!r}", limit)


def _plain(bound: float) -> str:
    """All digits of a whole number, so that a caller may copy it."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def check_request(spec: GenerationSpec, limits: Limits) -> None:
    """All checks that need no model."""
    if spec.request_id and not _REQUEST_ID.match(spec.request_id):
        raise invalid("request_id", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'", "128 characters")
    _check_name("model", spec.model)
    _check_input(spec, limits)
    _check_sampling(spec.sampling, spec.sampling_prefix)
    check_number("priority", spec.priority, -100, 100)
    check_number("slo.ttft_s", spec.slo_ttft_s, 0.0, MAX_SLO_S)
    check_number("slo.tpot_s", spec.slo_tpot_s, 0.0, MAX_SLO_S)
    check_number("timeout_s", spec.timeout_s, 0.0, limits.max_timeout_s)
    if len(spec.program_id.encode()) > MAX_NAME_BYTES:
        raise invalid("program_id", "is too long", f"{MAX_NAME_BYTES} bytes")
    _check_tools(spec)
    choices = max(1, len(spec.prompts)) * (spec.sampling.n or 1)
    if choices > limits.max_choices:
        raise invalid(f"{spec.sampling_prefix}n", f"{choices} choices are too many", f"{limits.max_choices} choices")


def _check_name(field: str, value: str) -> None:
    if not value:
        raise invalid(field, "must not be empty")
    if len(value.encode()) > MAX_NAME_BYTES:
        raise invalid(field, "is too long", f"{MAX_NAME_BYTES} bytes")


def _check_input(spec: GenerationSpec, limits: Limits) -> None:
    if spec.chat is not None:
        _check_chat(spec)
        return
    if not spec.prompts:
        raise invalid(spec.prompt_field, "must not be empty")
    if len(spec.prompts) > limits.max_prompts:
        raise invalid(spec.prompt_field, f"{len(spec.prompts)} prompts are too many", f"{limits.max_prompts} prompts")
    for prompt in spec.prompts:
        if not prompt:
            raise invalid(spec.prompt_field, "a prompt must not be empty")


def _check_chat(spec: GenerationSpec) -> None:
    messages = spec.chat or []
    if not messages:
        raise invalid("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"{len(messages)} messages are too many", f"{MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid(f"messages[{i}].role", f"must be one of {', '.join(sorted(ROLES))}")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages[{i}].tool_calls", "only an assistant message has calls")


def check_sampling_bounds(sampling: SamplingSpec, prefix: str) -> None:
    """Ranges of the plain numbers, as the comments in inference.proto state them."""
    ranges: tuple[tuple[str, float, float, bool], ...] = (
        ("temperature", 0.0, 2.0, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.0, 10.0, True),
        ("presence_penalty", -2.0, 2.0, False),
        ("frequency_penalty", -2.0, 2.0, False),
        ("top_k", -1, (1 << 31) - 1, False),
        ("n", 1, MAX_CHOICES_EACH, False),
        ("seed", *INT64, False),
        ("top_logprobs", 0, MAX_TOP_LOGPROBS, False),
        ("min_tokens", 0, (1 << 31) - 1, False),
        ("max_tokens", 1, (1 << 31) - 1, False),
    )
    for name, low, high, above_low in ranges:
        value = getattr(sampling, name)
        if value is not None:
            check_number(prefix + name, value, low, high, above_low=above_low)


def _check_sampling(sampling: SamplingSpec, prefix: str) -> None:
    check_sampling_bounds(sampling, prefix)
    if sampling.top_logprobs and not sampling.logprobs:
        raise invalid(f"{prefix}top_logprobs", "needs logprobs to be true")
    if sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
        raise invalid(f"{prefix}min_tokens", "must not be above max_tokens", f"{sampling.max_tokens} tokens")
    _check_stop(sampling, prefix)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(f"{prefix}logit_bias", "has too many entries", f"{MAX_LOGIT_BIAS} entries")
    for value in sampling.logit_bias.values():
        check_number(f"{prefix}logit_bias", value, -100.0, 100.0)


def _check_stop(sampling: SamplingSpec, prefix: str) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise invalid(f"{prefix}stop", "has too many strings", f"{MAX_STOP_STRINGS} strings")
    for stop in sampling.stop:
        if not stop:
            raise invalid(f"{prefix}stop", "a stop string must not be empty")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise invalid(f"{prefix}stop", "a stop string is too long", f"{MAX_STOP_BYTES} bytes")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"{prefix}stop_token_ids", "has too many ids", f"{MAX_STOP_TOKEN_IDS} ids")


def _check_tools(spec: GenerationSpec) -> None:
    if len(spec.tools) > MAX_TOOLS:
        raise invalid("tools", "has too many entries", f"{MAX_TOOLS} tools")
    for i, tool in enumerate(spec.tools):
        if not _TOOL_NAME.match(tool.name):
            raise invalid(f"tools[{i}].name", "must be 1 to 64 letters, digits, '_', '.' or '-'", "64 characters")
    _check_distinct(spec.tools)
    if spec.tools and spec.chat is None:
        raise unsupported("tools", "need chat messages")
    if spec.tool_mode in ("required", "named") and not spec.tools:
        raise invalid("tool_choice", "asks for a call, but there are no tools")
    if spec.tool_mode == "named" and spec.tool_name not in {tool.name for tool in spec.tools}:
        raise invalid("tool_choice", f"there is no tool {spec.tool_name!r}")
    if spec.tool_mode in ("required", "named") and spec.response_format != "text":
        raise unsupported("response_format", "cannot be combined with a required tool call")
    if spec.tools and spec.tool_mode == "auto" and spec.response_format != "text":
        raise unsupported("response_format", "would leave no way to call a tool; set tool_choice to none")
    if spec.response_format == "json_schema" and not spec.json_schema:
        raise invalid("response_format.json_schema", "must not be empty")


def _check_distinct(tools: Iterable[Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools are called {tool.name!r}")
        seen.add(tool.name)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a served model allows."""

    name: str
    context_tokens: int
    vocab_size: int
    pool_tokens: int
    """Tokens that the largest cache domain holds; 0: not known."""


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuses ids that the vocabulary does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(field, f"token id {token_id} is not in the vocabulary", f"0..{vocab_size - 1}")


def check_against_model(spec: GenerationSpec, model: ModelLimits) -> None:
    """Token ids in sampling fields; prompts are checked where they become tokens."""
    prefix = spec.sampling_prefix
    check_token_ids(f"{prefix}stop_token_ids", spec.sampling.stop_token_ids, model.vocab_size)
    check_token_ids(f"{prefix}logit_bias", spec.sampling.logit_bias, model.vocab_size)


def resolve_max_tokens(spec: GenerationSpec, prompt_tokens: int, model: ModelLimits, default_max_tokens: int) -> int:
    """Output tokens that a prompt may have; CONTEXT_TOO_LONG when prompt, or prompt + max_tokens, does not fit."""
    space = model.context_tokens if model.pool_tokens == 0 else min(model.context_tokens, model.pool_tokens)
    holder = f"the context of {model.name}" if space == model.context_tokens else "the largest KV pool"
    left = space - prompt_tokens
    if left < 1:
        raise too_long(spec.prompt_field, f"the prompt has {prompt_tokens} tokens; {holder} holds {space}", space)
    wanted = spec.sampling.max_tokens
    least = spec.sampling.min_tokens or 0
    if wanted is None:
        wanted = least if least > left else max(min(left, default_max_tokens), least)
    if wanted > left:
        message = f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the {space} of {holder}"
        raise too_long(f"{spec.sampling_prefix}max_tokens", message, space)
    return wanted


def too_long(field: str, message: str, space: int) -> MeshError:
    """CONTEXT_TOO_LONG with the tokens that there is space for."""
    return MeshError(errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, message, field=field, limit=f"{space} tokens")


_SAMPLING_FIELDS = tuple(item.name for item in fields(SamplingSpec))


def with_generation_defaults(sampling: SamplingSpec, defaults: SamplingSpec) -> SamplingSpec:
    """The sampling of a request with the model's generation defaults where it says nothing."""
    given = ((name, getattr(defaults, name)) for name in _SAMPLING_FIELDS)
    absent = {name: value for name, value in given if value and getattr(sampling, name) is None}
    return replace(sampling, **absent) if absent else sampling


def new_seed() -> int:
    """A seed for a request that gives none, kept over all its attempts."""
    return secrets.randbits(63)
