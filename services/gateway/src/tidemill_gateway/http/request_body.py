"""Fields that both OpenAI endpoints share, and those that are known and refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill_gateway.http.json_fields import Fields, as_integer, as_integers, as_number
from tidemill_gateway.spec import GenerationSpec, SamplingSpec
from tidemill_gateway.validation import MAX_LOGIT_BIAS, invalid, unsupported

IGNORED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Known, and without a meaning here."""


def _off(value: Any) -> bool:
    return value in (False, 0, "", [], {})


def _one_of(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "store": _off,
    "service_tier": _one_of("auto", "default"),
    "use_beam_search": _off,
    "prompt_logprobs": _off,
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "include_stop_str_in_output": _off,
    "length_penalty": _one_of(1, 1.0),
    "truncate_prompt_tokens": _off,
    "bad_words": _off,
    "allowed_token_ids": _off,
    "guided_json": _off,
    "guided_regex": _off,
    "guided_choice": _off,
    "guided_grammar": _off,
    "structured_outputs": _off,
    "logits_processors": _off,
}
"""Known fields -> the values that mean what we do anyway; any other is refused by name."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the answer is sent."""

    stream: bool
    include_usage: bool


def refuse_unsupported(fields: Fields, table: dict[str, Callable[[Any], bool]]) -> None:
    """UNSUPPORTED for known fields with values that this server does not offer."""
    for name in fields.names() & table.keys():
        value = fields.take(name)
        if value is not None and not table[name](value):
            raise unsupported(fields.path(name), "is not supported here")


def stream_options(fields: Fields) -> StreamOptions:
    """stream and stream_options."""
    stream = fields.boolean("stream")
    given = fields.object("stream_options")
    if given is not None and not stream:
        raise invalid("stream_options", "is only allowed with stream true")
    options = Fields(given or {}, "stream_options.")
    return StreamOptions(stream, options.boolean("include_usage"))


def sampling(fields: Fields) -> SamplingSpec:
    """Sampling fields of both endpoints; log-probabilities are spelt differently and come later."""
    return SamplingSpec(
        max_tokens=fields.integer("max_tokens"),
        min_tokens=fields.integer("min_tokens"),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed"),
        stop=_stop(fields),
        stop_token_ids=as_integers("stop_token_ids", fields.array("stop_token_ids") or []),
        ignore_eos=fields.boolean("ignore_eos"),
        n=fields.integer("n"),
    )


def fill_scheduling(spec: GenerationSpec, fields: Fields) -> None:
    """Our extensions: who goes first, targets, sessions and deadlines."""
    spec.priority = fields.integer("priority") or 0
    spec.slo_ttft_s = fields.number("slo_ttft_s") or 0.0
    spec.slo_tpot_s = fields.number("slo_tpot_s") or 0.0
    spec.program_id = fields.text("program_id") or ""
    spec.timeout_s = fields.number("timeout_s") or 0.0


def _stop(fields: Fields) -> list[str]:
    value = fields.take("stop")
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid("stop", "must be a string or an array of strings")
    return value


def _logit_bias(fields: Fields) -> dict[int, float]:
    given = fields.object("logit_bias") or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", "has too many entries", f"{MAX_LOGIT_BIAS} entries")
    return {_token_id(name): as_number(f"logit_bias.{name}", value) for name, value in given.items()}


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 10):
        raise invalid("logit_bias", f"{name[:32]!r} is not a token id")
    return as_integer("logit_bias", int(name))
