"""Chat templates by Hugging Face's conventions, in a sandbox: a template comes with a model and is not trusted."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefused(Exception):
    """The template does not take these messages; the message is its own words."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote; for inference it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self._render: Callable[..., str] = environment.from_string(source).render
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt that asks for the assistant's next message; TemplateRefused when the template objects."""
        try:
            return self._render(messages=messages, tools=tools, add_generation_prompt=True, **self._special_tokens)
        except _FAILURES as error:
            raise TemplateRefused(str(error) or type(error).__name__) from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens of tokenizer_config.json that templates name: bos_token, eos_token and the like."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            found[name] = content
    return found
