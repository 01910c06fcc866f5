"""Reads one tool call, `{"name": ..., "arguments": ...}`, from JSON that arrives in pieces."""

from typing import Any

import orjson

_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Says what is known of a call so far: its name, and its arguments as far as their text has come.

    It finds only where the members of the one object begin and end; whether the text is JSON at all shows at its end.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.text = ""
        """All that was fed and belongs to the object."""
        self.complete = False
        """The object's closing brace has come."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._key_at = -1
        self._value_at = -1
        self._arguments: tuple[int, int] | None = None
        """Where the arguments' text begins and, once it has come, ends (else -1)."""

    def feed(self, piece: str) -> str:
        """Takes a piece; gives back what comes after the object."""
        if not self.text:
            piece = piece.lstrip()
        base = len(self.text)
        self.text += piece
        for i, character in enumerate(piece):
            self._step(character, base + i)
            if self.complete:
                self.text = self.text[: base + i + 1]
                return piece[i + 1 :]
        return ""

    def arguments_from(self, offset: int) -> str:
        """The arguments' text behind an offset; empty as long as they are neither an object nor an array."""
        if self._arguments is None:
            return ""
        start, end = self._arguments
        return self.text[start + offset : end] if end >= 0 else self.text[start + offset :]

    def value(self) -> Any:
        """The whole object; None when the text is not JSON."""
        try:
            return orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return None

    def _step(self, character: str, at: int) -> None:
        if self._in_string:
            self._in_a_string(character, at)
        elif character == '"':
            self._in_string = True
            if self._depth == 1 and self._key is None:
                self._key_at = at
            elif self._depth == 1 and self._value_at < 0:
                self._value_at = at
        elif character in "{[":
            self._open(at)
        elif character in "}]":
            self._close(at)
        elif character == "," and self._depth == 1:
            self._key, self._value_at = None, -1

    def _in_a_string(self, character: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1:
                self._string_ended(at)

    def _string_ended(self, at: int) -> None:
        if self._key is None:
            self._key = _string(self.text[self._key_at : at + 1])
        elif self._key == "name" and self.name is None:
            self.name = _string(self.text[self._value_at : at + 1])

    def _open(self, at: int) -> None:
        if self._depth == 1 and self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = (at, -1)
        self._depth += 1

    def _close(self, at: int) -> None:
        self._depth -= 1
        if self._depth == 1 and self._arguments is not None and self._arguments[1] < 0:
            self._arguments = (self._arguments[0], at + 1)
        self.complete = self._depth <= 0


def _string(text: str) -> str:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return ""
    return value if isinstance(value, str) else ""
