"""The bytes behind each token id, by the kinds of decoder that language models use.

ByteLevel (GPT-2 style) vocabularies spell each byte as a printable character; SentencePiece ones write a space as
U+2581 and have one token for each byte (`<0xE4>`). Special tokens stand for no bytes.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class UnsupportedTokenizer(Exception):
    """The tokenizer's decoder is of a kind that this gateway cannot run incrementally; says which."""


def _printable_bytes() -> dict[str, int]:
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(b): b for b in kept}
    moved = [b for b in range(256) if b not in set(kept)]
    return table | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF_CHARACTER = _printable_bytes()


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder.get("type") == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _decoder_types(part)}
    return {str(decoder.get("type"))}


class TokenBytes:
    """Bytes of token ids, filled in as ids are first seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        kinds = _decoder_types(json.loads(tokenizer.to_str()).get("decoder"))
        self.byte_level = "ByteLevel" in kinds
        if not self.byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise UnsupportedTokenizer(f"decoder {sorted(kinds) or 'none'}")
        self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content.encode() for i, token in added.items() if not token.special}
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; empty for special tokens and ids that the vocabulary lacks."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = b"" if token_id in self.special_ids else self._spell(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text where its bytes are whole characters; None where others are needed to read them."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self.text_bytes(token_id).decode()
        self._whole[token_id] = text
        return text

    def display_bytes(self, token_id: int) -> bytes:
        """Bytes to show for the token in log-probabilities, where special tokens have a name too."""
        if token_id in self.special_ids:
            return str(self._tokenizer.id_to_token(token_id)).encode()
        return self.text_bytes(token_id)

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            codes = [_BYTE_OF_CHARACTER.get(character, -1) for character in token]
            return token.encode() if -1 in codes else bytes(codes)
        match = _BYTE_TOKEN.match(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
