"""Finds Hermes-style `<tool_call>{...}</tool_call>` in text that arrives in pieces, and calls in constrained output."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import orjson

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments_json` is the text of a JSON value."""

    id: str
    name: str
    arguments_json: str


@dataclass(slots=True)
class Parsed:
    """Text outside of calls, and the calls that became complete."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def new_call(name: str, arguments_json: str) -> ToolCall:
    """A call with an id of its own."""
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments_json)


def _as_call(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return new_call(value["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode())


class HermesParser:
    """Splits free text into content and calls; what is no call of a known tool stays content, tags and all."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._inside = False
        self._seen_call = False

    def push(self, text: str) -> Parsed:
        """Holds back only a possible tag, the white space before one, and the inside of a call."""
        self._buffer += text
        parsed = Parsed()
        while self._inside or _OPEN in self._buffer:
            if not self._inside:
                before, _, self._buffer = self._buffer.partition(_OPEN)
                parsed.text += before.rstrip()
                self._inside = True
            if _CLOSE not in self._buffer:
                return parsed
            inner, _, self._buffer = self._buffer.partition(_CLOSE)
            self._inside = False
            self._take(parsed, inner, _CLOSE)
        shown = self._shown_length()
        parsed.text += self._without_gap(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return parsed

    def finish(self) -> Parsed:
        """Takes a call whose closing tag is missing, else gives the held text back."""
        parsed = Parsed()
        if self._inside:
            self._take(parsed, self._buffer, "")
        elif not (self._seen_call and self._buffer.isspace()):
            parsed.text = self._buffer
        self._buffer = ""
        return parsed

    def _take(self, parsed: Parsed, inner: str, close: str) -> None:
        try:
            call = _as_call(orjson.loads(inner), self._names)
        except orjson.JSONDecodeError:
            call = None
        if call is None:
            parsed.text += _OPEN + inner + close
        else:
            self._seen_call = True
            parsed.calls.append(call)

    def _without_gap(self, text: str) -> str:
        """White space between calls says nothing."""
        return "" if self._seen_call and text.isspace() else text

    def _shown_length(self) -> int:
        """Up to white space at the end, or white space and a proper prefix of the opening tag."""
        text = self._buffer
        for length in range(min(len(_OPEN) - 1, len(text)), 0, -1):
            if text.endswith(_OPEN[:length]):
                text = text[:-length]
                break
        return len(text.rstrip())


class WholeOutputParser:
    """Output that a grammar confines to calls: the arguments of one named tool, or calls as JSON."""

    def __init__(self, names: Collection[str], named: str = "") -> None:
        self._names = names
        self._named = named
        self._pieces: list[str] = []

    def push(self, text: str) -> Parsed:
        """Nothing is complete before the end."""
        self._pieces.append(text)
        return Parsed()

    def finish(self) -> Parsed:
        """The calls; output cut by a token limit gives the arguments of a named tool as far as they got."""
        text = "".join(self._pieces).strip()
        if self._named:
            return Parsed(calls=[new_call(self._named, text)] if text else [])
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return Parsed(text=text)
        items = value if isinstance(value, list) else [value]
        calls = [_as_call(item, self._names) for item in items]
        return Parsed(calls=[call for call in calls if call is not None])
