"""The body of /v1/completions to a request."""

from typing import Any

from tidemill_gateway.http.json_fields import Fields, as_integers
from tidemill_gateway.http.request_body import (
    IGNORED,
    UNSUPPORTED,
    StreamOptions,
    fill_scheduling,
    refuse_unsupported,
    sampling,
    stream_options,
)
from tidemill_gateway.spec import GenerationSpec
from tidemill_gateway.validation import MAX_TOP_LOGPROBS, check_number, invalid, unsupported

_UNSUPPORTED = UNSUPPORTED | {
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "response_format": lambda value: value == {"type": "text"},
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value == "none",
}


def parse_completion(body: dict[str, Any]) -> tuple[GenerationSpec, StreamOptions, list[str]]:
    """The request, how to send its answer, and the names of unknown fields."""
    fields = Fields(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    for name in IGNORED:
        fields.take(name)
    options = stream_options(fields)
    spec = GenerationSpec(model=fields.text("model") or "", prompt_field="prompt")
    spec.prompts = _prompts(fields.take("prompt"))
    spec.sampling = sampling(fields)
    logprobs = fields.integer("logprobs")
    if logprobs is not None:
        check_number("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
        spec.sampling.logprobs = True
        spec.sampling.top_logprobs = logprobs
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != (spec.sampling.n or 1):
        raise unsupported("best_of", "only the value of n is supported")
    fill_scheduling(spec, fields)
    return spec, options, fields.unknown()


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("prompt", "must be a string, an array of strings, of token ids, or of arrays of token ids")
    if value and all(isinstance(item, str) for item in value):
        return list(value)
    if value and all(isinstance(item, list) for item in value):
        return [as_integers(f"prompt[{i}]", item) for i, item in enumerate(value)]
    if any(isinstance(item, str | list) for item in value):
        raise invalid("prompt", "must not mix strings and token ids")
    return [as_integers("prompt", value)]
