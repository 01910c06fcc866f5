"""Tokenises ASCII text by words that were seen before: a byte-level BPE's pieces do not depend on their neighbours.

A tokenizer spends its time on cutting the text with offsets kept and on looking each piece up; here one regular
expression cuts, and a dictionary gives the ids of each piece. Text of other scripts is the tokenizer's own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

MAX_WORDS = 1 << 16
MAX_WORD_CHARS = 64
"""Longer pieces are rarely seen twice."""
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by when it is told to use its own pattern."""
_ASCII_CLASSES = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}
_NEUTRAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""They leave ASCII text as it is."""
_SAMPLES = (
    "It's 1,024 tokens; they'll ask: \"why?\"  Two  spaces,\n\n\ttabs\r\nand __names__ (x=3.14).   \n end ",
    "  DON'T stop\n\n\n   you'VE\n  if x:\n\t\treturn f(a, b)[12345:]  # 100%\n'",
)


class _Unsupported(Exception):
    """The tokenizer does something that this module does not know."""


class WordEncoder:
    """Made by `word_encoder`, for tokenizers of a known kind."""

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._cuts = [re.compile(pattern, re.ASCII) for pattern in _cuts(config["pre_tokenizer"])]
        if any(cut.groups for cut in self._cuts):
            raise _Unsupported("a pattern with groups")
        self._added = [re.compile(f"({pattern})") for pattern in _added_patterns(config["added_tokens"])]
        self._added_ids = {token["content"]: int(token["id"]) for token in config["added_tokens"]}
        self._before, self._after = _special_ids(tokenizer)
        self._spelling = _spelling()
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids as the tokenizer gives them; None for text that only the tokenizer itself can cut."""
        if not text.isascii():
            return None
        ids: list[int] = list(self._before) if add_special_tokens else []
        for piece in self._apart(text):
            added = self._added_ids.get(piece)
            if added is not None:
                ids.append(added)
            elif not self._encode_piece(piece, ids):
                return None
        if add_special_tokens:
            ids += self._after
        return ids

    def _apart(self, text: str) -> list[str]:
        """The text between added tokens, and those."""
        pieces = [text]
        for pattern in self._added:
            if pattern.search(text) is not None:
                pieces = [part for piece in pieces for part in self._split_off(pattern, piece) if part]
        return pieces

    def _split_off(self, pattern: re.Pattern[str], piece: str) -> list[str]:
        return [piece] if piece in self._added_ids else pattern.split(piece)

    def _encode_piece(self, text: str, ids: list[int]) -> bool:
        words = [text]
        for cut in self._cuts:
            words = cut.findall(words[0]) if len(words) == 1 else [w for word in words for w in cut.findall(word)]
        known = self._words
        num_chars = 0
        for word in words:
            num_chars += len(word)
            found = known.get(word)
            ids += self._learn(word) if found is None else found
        # What a pattern passes over would be missing.
        return num_chars == len(text)

    def _learn(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._tokenizer.model.tokenize(word.translate(self._spelling)))
        if len(word) <= MAX_WORD_CHARS:
            if len(self._words) >= MAX_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids


def word_encoder(tokenizer: Tokenizer, config: Mapping[str, Any]) -> WordEncoder | None:
    """For a tokenizer whose `tokenizer.json` is `config`; None when it is of another kind, or disagrees on a sample."""
    try:
        _check_kind(config)
        encoder = WordEncoder(tokenizer, config)
        for text in _SAMPLES:
            for special in (False, True):
                if encoder.encode(text, add_special_tokens=special) != _ids(tokenizer, text, special):
                    return None
    except (_Unsupported, KeyError, re.error):
        return None
    return encoder


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def _check_kind(config: Mapping[str, Any]) -> None:
    model = config["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        raise _Unsupported("not a plain BPE")
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        raise _Unsupported("pieces that are spelled otherwise")
    kinds = {part["type"] for part in _parts(config.get("normalizer"), "normalizers")}
    if kinds - _NEUTRAL_NORMALIZERS:
        raise _Unsupported("a normalizer that changes ASCII")


def _parts(item: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if item is None:
        return []
    return list(item[name]) if item["type"] == "Sequence" else [item]


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """The patterns that cut, one after another; each takes the pieces of the one before."""
    cuts = []
    parts = _parts(pre_tokenizer, "pretokenizers")
    for i, part in enumerate(parts):
        kind = part["type"]
        if kind == "Digits":
            cuts.append(r"[0-9]|[^0-9]+" if part["individual_digits"] else r"[0-9]+|[^0-9]+")
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            cuts.append(_in_ascii(part["pattern"]["Regex"]))
        elif kind == "ByteLevel" and i + 1 == len(parts) and not part["add_prefix_space"]:
            cuts += [_in_ascii(GPT2_PATTERN)] if part["use_regex"] else []
        else:
            raise _Unsupported(f"pre-tokenizer {kind}")
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise _Unsupported("not byte-level")
    return cuts


def _in_ascii(pattern: str) -> str:
    """The pattern for ASCII text, in Python's dialect."""
    made, in_class, at = [], False, 0
    while at < len(pattern):
        name = pattern[at : at + 5]
        if name in _ASCII_CLASSES:
            made.append(_ASCII_CLASSES[name] if in_class else f"[{_ASCII_CLASSES[name]}]")
            at += 5
            continue
        if pattern[at] == "\\":
            if pattern[at + 1 : at + 2] not in set("sSrntdw'\"/.-"):
                raise _Unsupported(f"pattern {pattern}")
            made.append(pattern[at : at + 2])
            at += 2
            continue
        in_class = (in_class or pattern[at] == "[") and pattern[at] != "]"
        made.append(pattern[at])
        at += 1
    return "".join(made)


def _added_patterns(added_tokens: Iterable[Mapping[str, Any]]) -> list[str]:
    """Added tokens are found first: those of the text as it is, then those of its normalised form."""
    contents: dict[bool, list[str]] = {False: [], True: []}
    for token in added_tokens:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise _Unsupported("an added token that takes its surroundings in")
        if token["content"].isascii():
            contents[bool(token["normalized"])].append(token["content"])
    longest_first = [sorted(group, key=len, reverse=True) for group in contents.values()]
    return ["|".join(map(re.escape, group)) for group in longest_first if group]


def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain, whole = _ids(tokenizer, "a", False), _ids(tokenizer, "a", True)
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    raise _Unsupported("a post-processor that changes the text's own tokens")


def _spelling() -> dict[int, str]:
    """How a byte-level vocabulary spells ASCII characters: the printable ones as they are, others from U+0100 on."""
    moved = [byte for byte in range(0x80) if not 0x21 <= byte <= 0x7E]
    return {byte: chr(0x100 + i) for i, byte in enumerate(moved)}
