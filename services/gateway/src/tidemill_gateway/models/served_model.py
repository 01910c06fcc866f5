"""One revision of a model as the gateway uses it: text to token ids and back."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from tokenizers import Tokenizer

from tidemill.mesh.v1.membership_pb2 import ModelCard
from tidemill_gateway.spec import ChatMessage, SamplingSpec, Tool
from tidemill_gateway.text.chat_template import ChatTemplate, TemplateRefused, special_tokens
from tidemill_gateway.text.token_bytes import TokenBytes, UnsupportedTokenizer
from tidemill_gateway.text.tool_prompt import as_plain_messages, signature, with_tool_instructions
from tidemill_gateway.text.word_encoder import WordEncoder, word_encoder
from tidemill_gateway.validation import check_sampling_bounds, invalid, unsupported
from tidemill_mesh.errors import MeshError

INLINE_CHARS = 16384
"""Longer texts are tokenised on a thread, so that other streams keep their pace."""
PIECE_CHARS = 8
"""For each token that may be: the length of the piece by which a long text is judged."""

log = structlog.get_logger()


@dataclass(frozen=True)
class ServedModel:
    """A model card with its tokenizer and template."""

    card: ModelCard
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    template: ChatTemplate | None
    defaults: SamplingSpec
    words: WordEncoder | None = None
    """The tokenizer's short cut, where it is of a kind that has one."""
    longest_token_chars: int = 0
    """0: the tokenizer rewrites texts first, so that their length tells nothing for certain."""

    @property
    def display_name(self) -> str:
        """Name and revision, as shown to callers."""
        return f"{self.card.name}@{self.card.revision}"

    def chat_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        """The prompt's text by the model's template; UNSUPPORTED without one."""
        if self.template is None:
            raise unsupported("messages", f"model {self.card.name} has no chat template")
        shown: Sequence[ChatMessage] = messages
        if not self.template.takes_tools:
            shown = as_plain_messages(_told_of(tools, messages) if tools else messages)
        described = [signature(tool) for tool in tools] if tools and self.template.takes_tools else None
        try:
            text = self.template.render([_as_template_message(message) for message in shown], described)
        except TemplateRefused as refusal:
            raise invalid("messages", f"the model's chat template refuses them: {refusal}") from refusal
        _check_encodable(text)
        return text

    async def encode_within(self, text: str, most_tokens: int, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids of a text; None for one of far more than `most_tokens`, most of which is not even looked at.

        Tokenising takes a hundred times a text's size in memory, and seconds for each few MiB.
        """
        if len(text) > INLINE_CHARS:
            if self.longest_token_chars and len(text) > most_tokens * self.longest_token_chars:
                return None
            piece = text[: most_tokens * PIECE_CHARS]
            # The cut may cost a few tokens, never half of them.
            if len(piece) < len(text) and len(await self.encode(piece, add_special_tokens=False)) > 2 * most_tokens:
                return None
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, however long."""
        if len(text) <= INLINE_CHARS:
            known = None if self.words is None else self.words.encode(text, add_special_tokens=add_special_tokens)
            if known is not None:
                return known
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return await asyncio.to_thread(self._encode_long, text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: the binding gives up the interpreter lock only for batches.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def load_model(card: ModelCard, tokenizer_json: bytes, template: bytes, tokenizer_config: bytes) -> ServedModel:
    """Builds a model from its assets; bad ones raise UnsupportedTokenizer, or whatever their shape leads to."""
    config = json.loads(tokenizer_config) if tokenizer_config else {}
    tokenizer = _parse_tokenizer(tokenizer_json.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    source = template.decode() or _template_of(config)
    words = word_encoder(tokenizer, json.loads(tokenizer.to_str()))
    if words is None:
        log.info("prompts are tokenised without the short cut for known words", model=card.name)
    return ServedModel(
        card=card,
        tokenizer=tokenizer,
        token_bytes=TokenBytes(tokenizer),
        template=ChatTemplate(source, special_tokens(config)) if source else None,
        defaults=generation_defaults(card.generation_config_json),
        words=words,
        longest_token_chars=0 if tokenizer.normalizer else max(map(len, tokenizer.get_vocab())),
    )


def _parse_tokenizer(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the binding raises no narrower type
        raise UnsupportedTokenizer(f"tokenizer.json: {error}") from error


def _template_of(config: Mapping[str, Any]) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), "")
    return template if isinstance(template, str) else ""


def generation_defaults(generation_config_json: str) -> SamplingSpec:
    """Sampling defaults of generation_config.json; what is out of range is left out and logged."""
    config = json.loads(generation_config_json) if generation_config_json else {}
    defaults = SamplingSpec()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if value is None:
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
                raise invalid(name, "is not a number")
            candidate = SamplingSpec()
            setattr(candidate, name, value)
            check_sampling_bounds(candidate, "")
        except MeshError as error:
            log.warning("a generation default of the model is not used", field=name, reason=error.message)
            continue
        setattr(defaults, name, value)
    return defaults


def _as_template_message(message: ChatMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        shown["name"] = message.name
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _as_value(c.arguments_json)}}
            for c in message.tool_calls
        ]
    return shown


def _as_value(arguments_json: str) -> Any:
    """Templates write arguments with `tojson`, so they get the value; text that is no JSON stays text."""
    try:
        return json.loads(arguments_json)
    except (ValueError, RecursionError):
        return arguments_json


def _told_of(tools: Sequence[Tool], messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    try:
        return with_tool_instructions(messages, tools)
    except RecursionError as error:
        raise invalid("tools", "a tool's parameters are nested too deeply") from error


def _check_encodable(text: str) -> None:
    # The escape \ud800 alone, in arguments or in a tool's schema, is a str that no tokenizer takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid("messages", "their prompt holds a lone surrogate, which is no text") from error
