"""Incremental detokenisation: whole characters only, O(1) amortised for each token."""

import codecs
from collections.abc import Iterable

from tidemill_gateway.text.token_bytes import TokenBytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns output tokens into text; bytes of an unfinished character wait for the rest of it.

    The joined results of `push` and `finish` equal the decoding of all bytes at once. U+FFFD appears only where the
    bytes are not UTF-8, which includes a character that the end of output cuts.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = _utf8(errors="replace")
        self._strip = token_bytes.strips_first_space
        self._between_characters = True

    def push(self, token_id: int) -> str:
        """Text that the token completes, possibly empty."""
        if self._between_characters and not self._strip:
            whole = self._token_bytes.whole_text(token_id)
            if whole is not None:
                return whole
        data = self._token_bytes.text_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data)
        self._between_characters = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """What an unfinished character leaves."""
        return self._decoder.decode(b"", True)


def detokenize(token_bytes: TokenBytes, token_ids: Iterable[int]) -> str:
    """Text of a whole output."""
    data = b"".join(map(token_bytes.text_bytes, token_ids))
    if token_bytes.strips_first_space:
        data = data.removeprefix(b" ")
    return data.decode("utf-8", errors="replace")
