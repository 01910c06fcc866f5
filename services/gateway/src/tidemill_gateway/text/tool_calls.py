"""Finds Hermes-style `<tool_call>{...}</tool_call>` in text that arrives in pieces, and calls in constrained output."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import orjson

from tidemill_gateway.text.call_scanner import CallScanner

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments_json` is the text of a JSON value."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of the call of that index: the first has its id and name, all have the next piece of its arguments."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(slots=True)
class Parsed:
    """Text outside of calls, pieces of calls as they come, and the calls that became complete."""

    text: str = ""
    parts: list[CallPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def append(self, other: "Parsed") -> None:
        """Takes what came next."""
        self.text += other.text
        self.parts += other.parts
        self.calls += other.calls


class _CallStream:
    """One call on its way out: its arguments are sent as they come, each character once."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.scanner = CallScanner()
        self.id = f"call_{secrets.token_hex(12)}"
        self.index = index
        self.begun = False
        self._names = names
        self._sent = 0

    def advance(self, parsed: Parsed) -> None:
        """Adds what is new and certain."""
        new = self.scanner.arguments_from(self._sent)
        if new and self.scanner.name in self._names:
            self._send(parsed, new)

    def end(self, parsed: Parsed) -> bool:
        """The call is over: adds the rest and the whole; False when it is none and nothing of it was sent."""
        found = _name_and_arguments(self.scanner.value(), self._names)
        if found is None and not self.begun:
            return False
        # The text of the arguments as it was written, where it is what the call means.
        arguments = self.scanner.arguments_from(0) or (found[1] if found else "")
        name = found[0] if found else self.scanner.name or ""
        if not self.begun or len(arguments) > self._sent:
            self._send(parsed, arguments[self._sent :])
        parsed.calls.append(ToolCall(self.id, name, arguments))
        return True

    def _send(self, parsed: Parsed, new: str) -> None:
        first = not self.begun
        self.begun = True
        name = self.scanner.name or ""
        parsed.parts.append(CallPart(self.index, self.id if first else "", name if first else "", new))
        self._sent += len(new)


def _name_and_arguments(value: Any, names: Collection[str]) -> tuple[str, str] | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


class HermesParser:
    """Splits free text into content and calls; what is no call of a known tool stays content, tags and all."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._call: _CallStream | None = None
        self._inner = ""
        self._num_calls = 0

    def push(self, text: str) -> Parsed:
        """Holds back only a possible tag, the white space before one, and of a call what is not yet certain."""
        self._buffer += text
        parsed = Parsed()
        while self._call is not None or _OPEN in self._buffer:
            if self._call is None:
                before, _, self._buffer = self._buffer.partition(_OPEN)
                parsed.text += before.rstrip()
                self._call, self._inner = _CallStream(self._num_calls, self._names), ""
            closed = _CLOSE in self._buffer
            if closed:
                inner, _, self._buffer = self._buffer.partition(_CLOSE)
            else:
                cut = len(self._buffer) - _prefix_length(self._buffer, _CLOSE)
                inner, self._buffer = self._buffer[:cut], self._buffer[cut:]
            self._inside(parsed, self._call, inner)
            if not closed:
                return parsed
            self._end_call(parsed, _CLOSE)
        shown = len(self._buffer[: len(self._buffer) - _prefix_length(self._buffer, _OPEN)].rstrip())
        parsed.text += self._without_gap(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return parsed

    def finish(self) -> Parsed:
        """Takes a call whose closing tag is missing, else gives the held text back."""
        parsed = Parsed()
        if self._call is not None:
            self._inside(parsed, self._call, self._buffer)
            self._end_call(parsed, "")
        elif not (self._num_calls and self._buffer.isspace()):
            parsed.text = self._buffer
        self._buffer = ""
        return parsed

    def _inside(self, parsed: Parsed, call: _CallStream, text: str) -> None:
        self._inner += text
        if not call.scanner.complete:
            call.scanner.feed(text)
        call.advance(parsed)

    def _end_call(self, parsed: Parsed, close: str) -> None:
        call, self._call = self._call, None
        assert call is not None, "a call is open"
        if call.end(parsed):
            self._num_calls += 1
        else:
            parsed.text += _OPEN + self._inner + close

    def _without_gap(self, text: str) -> str:
        """White space between calls says nothing."""
        return "" if self._num_calls and text.isspace() else text


def _prefix_length(text: str, tag: str) -> int:
    """Length of the longest end of the text that is a proper prefix of the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class NamedCallParser:
    """Output that a grammar confines to the arguments of one named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._id = f"call_{secrets.token_hex(12)}"
        self._arguments = ""
        self._gap = ""

    def push(self, text: str) -> Parsed:
        """All of it is arguments; white space is held back, as the last says nothing."""
        text = self._gap + text if self._arguments else text.lstrip()
        shown = text.rstrip()
        self._gap = text[len(shown) :]
        if not shown:
            return Parsed()
        first = not self._arguments
        self._arguments += shown
        return Parsed(parts=[CallPart(0, self._id if first else "", self._name if first else "", shown)])

    def finish(self) -> Parsed:
        """The call; output cut by a token limit gives the arguments as far as they got."""
        return Parsed(calls=[ToolCall(self._id, self._name, self._arguments)] if self._arguments else [])


class RequiredCallsParser:
    """Output that a grammar confines to one call, or an array of calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pieces: list[str] = []
        self._call: _CallStream | None = None
        self._num_calls = 0

    def push(self, text: str) -> Parsed:
        """Pieces of calls as they come."""
        self._pieces.append(text)
        parsed = Parsed()
        while text:
            if self._call is None:
                # Brackets, commas and white space stand between calls.
                start = text.find("{")
                if start < 0:
                    break
                text = text[start:]
                self._call = _CallStream(self._num_calls, self._names)
            text = self._call.scanner.feed(text)
            self._call.advance(parsed)
            if self._call.scanner.complete:
                self._num_calls += self._call.end(parsed)
                self._call = None
        return parsed

    def finish(self) -> Parsed:
        """A call that a token limit cut is no call; text without any call is shown as it is."""
        if self._num_calls or (self._call is not None and self._call.begun):
            return Parsed()
        return Parsed(text="".join(self._pieces).strip())
