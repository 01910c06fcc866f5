"""Log-probabilities as the two endpoints spell them."""

import codecs
from collections.abc import Sequence
from typing import Any

from tidemill.mesh.v1.worker_pb2 import Logprobs
from tidemill_gateway.output import ChoiceOutput
from tidemill_gateway.text.token_bytes import TokenBytes

_utf8 = codecs.getincrementaldecoder("utf-8")


def _shown(output: ChoiceOutput) -> list[tuple[int, Logprobs]]:
    """Tokens with text: a stop token has none, so the joined tokens are the text."""
    pairs = list(zip(output.token_ids, output.logprobs, strict=True))
    return pairs[:-1] if output.ends_with_stop_token else pairs


def _entry(token_bytes: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    data = token_bytes.display_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def chat_logprobs(output: ChoiceOutput, token_bytes: TokenBytes) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}."""
    content = []
    for token_id, given in _shown(output):
        entry = _entry(token_bytes, token_id, given.logprob)
        tops = zip(given.top_token_ids, given.top_logprobs, strict=True)
        entry["top_logprobs"] = [_entry(token_bytes, other, value) for other, value in tops]
        content.append(entry)
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """{text_offset, token_logprobs, tokens, top_logprobs} of one choice, chunk by chunk."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = _utf8(errors="replace")
        self._offset = 0

    def render(self, output: ChoiceOutput) -> dict[str, Any]:
        """The log-probabilities of new tokens; offsets count characters of the choice's text."""
        shown: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, given in _shown(output):
            data = self._token_bytes.text_bytes(token_id)
            shown["text_offset"].append(self._offset)
            shown["tokens"].append(self._name(token_id))
            shown["token_logprobs"].append(given.logprob)
            shown["top_logprobs"].append(self._top(token_id, given))
            self._offset += len(self._decoder.decode(data))
        return shown

    def _top(self, token_id: int, given: Logprobs) -> dict[str, float]:
        tops: Sequence[tuple[int, float]] = list(zip(given.top_token_ids, given.top_logprobs, strict=True))
        return {self._name(other): value for other, value in tops} | {self._name(token_id): given.logprob}

    def _name(self, token_id: int) -> str:
        return self._token_bytes.display_bytes(token_id).decode("utf-8", "replace")
