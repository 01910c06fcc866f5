"""Stop strings across token borders: nothing of a stop string is shown, nothing else is held back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` may be shown; `stop_string` is the one that was found, if one was."""

    text: str
    stop_string: str | None = None


class StopStrings:
    """Finds the stop string that is complete first in text that arrives in pieces.

    Of two that end at one character the longer wins, so that nothing of it is shown. Held back is only the longest tail
    that is a proper prefix of a stop string. Neither depends on where the pieces are cut.
    """

    def __init__(self, stop_strings: list[str]) -> None:
        self._stops = sorted(set(stop_strings), key=len)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, piece: str) -> StopMatch:
        """Text that can no longer be part of a stop string."""
        if not self._stops or not piece:
            return StopMatch(piece)
        text = self._held + piece
        found = self._first_complete(text, len(self._held))
        if found is not None:
            self._held = ""
            return StopMatch(text[: found[0]], found[1])
        shown = len(text) - self._tail_length(text)
        self._held = text[shown:]
        return StopMatch(text[:shown])

    def finish(self) -> str:
        """The held tail: the output ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str, old: int) -> tuple[int, str] | None:
        """Start and stop string of the first complete match; it must reach past the `old` leading characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _tail_length(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - len(self._stops[-1]) + 1), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
