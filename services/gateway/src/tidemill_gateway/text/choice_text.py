"""Output tokens of one choice to the text and tokens that a client may see."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.mesh.v1.worker_pb2 import Logprobs
from tidemill_gateway.text.detokenizer import Detokenizer
from tidemill_gateway.text.stop_strings import StopStrings
from tidemill_gateway.text.token_bytes import TokenBytes


@dataclass(slots=True)
class TextDelta:
    """What became visible; `logprobs` is empty or has one entry for each of `token_ids`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    stop_string: str = ""


class ChoiceText:
    """Tokens are released with the text they end in, so that none of a stop string's tokens is shown either.

    A stop token adds no text. After a stop string was found, nothing more may be pushed.
    """

    def __init__(self, token_bytes: TokenBytes, stop_strings: Sequence[str], stop_token_ids: Iterable[int]) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(list(stop_strings)) if stop_strings else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoded_chars = 0
        self._shown_chars = 0
        self._waiting: deque[tuple[int, int, Logprobs | None]] = deque()
        self.num_tokens = 0
        """Tokens pushed: what the caller is charged for."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> TextDelta:
        """Runs the tokens through detokenisation and stop strings; ends at the first stop string."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return TextDelta("".join(map(self._decode, token_ids)), list(token_ids), list(logprobs))
        delta = TextDelta()
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            piece = self._decode(token_id)
            self._decoded_chars += len(piece)
            self._waiting.append((self._decoded_chars, token_id, logprobs[i] if logprobs else None))
            match = self._stops.push(piece)
            self._show(delta, match.text)
            if match.stop_string is not None:
                delta.stop_string = match.stop_string
                break
        return delta

    def finish(self) -> TextDelta:
        """Flushes what was held back, by the same path as other text."""
        delta = TextDelta()
        tail = self._detokenizer.finish()
        if self._stops is None:
            delta.text = tail
            return delta
        self._decoded_chars += len(tail)
        match = self._stops.push(tail)
        self._show(delta, match.text)
        if match.stop_string is None:
            self._show(delta, self._stops.finish())
            self._show_rest(delta)
        else:
            delta.stop_string = match.stop_string
        return delta

    def _decode(self, token_id: int) -> str:
        return "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)

    def _show(self, delta: TextDelta, text: str) -> None:
        delta.text += text
        self._shown_chars += len(text)
        while self._waiting and self._waiting[0][0] <= self._shown_chars:
            self._release(delta)

    def _show_rest(self, delta: TextDelta) -> None:
        while self._waiting:
            self._release(delta)

    def _release(self, delta: TextDelta) -> None:
        _, token_id, logprobs = self._waiting.popleft()
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
