"""The short cut for known words gives what the tokenizer gives, for any text, or says that it cannot."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tidemill_gateway.text import word_encoder as module
from tidemill_gateway.text.word_encoder import word_encoder

CORPUS = [
    "It's a mill; they'll say we've 1024 wheels, and the river DON'T care. return f(x)[12:] # why?\n\n",
    "The river carries the mill's wheel round while the tide holds its breath.\n\tif tide:\n\t\treturn 3.14\r\n",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
PIECES = ["a", "mill", "'s", "'LL", "12", "345", " ", "  ", "\n", "\t", "\r\n", "\x0b", "\x1c", "\x00", "\x7f", "x_y",
          "<|", "|>", "...", "DON'T", "(", '"', "<|end|>", "<|end|>s", "<tool>", "é", "水", "²", "\u00a0"]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(st.characters(max_codepoint=300))
)


def make(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|end|>s", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    ends = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", ends)])
    return tokenizer


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def pair(request):
    """A tokenizer and its short cut."""
    tokenizer = make(request.param)
    return tokenizer, word_encoder(tokenizer, json.loads(tokenizer.to_str()))


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_ids_are_those_of_the_tokenizer(pair, text, special):
    tokenizer, words = pair
    ids = words.encode(text, add_special_tokens=special)
    assert (ids is None) == (not text.isascii())
    assert ids is None or ids == tokenizer.encode(text, add_special_tokens=special).ids


def test_the_words_that_are_kept_are_bounded(pair, monkeypatch):
    tokenizer, words = pair
    monkeypatch.setattr(module, "MAX_WORDS", 4)
    text = " ".join(CORPUS) + "x" * 100
    for _ in range(2):
        assert words.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(words._words) <= 4


def _lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _prefix_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _metaspace(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


def _swallows_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _unknown_class(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(r"\p{Lu}+|\p{L}+|[^\p{L}]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])


@pytest.mark.parametrize("change", [_lower, _prefix_space, _metaspace, _swallows_spaces, _unknown_class])
def test_a_tokenizer_of_another_kind_has_no_short_cut(change):
    tokenizer = make("gpt2")
    change(tokenizer)
    assert word_encoder(tokenizer, json.loads(tokenizer.to_str())) is None


def test_a_short_cut_that_disagrees_is_not_used():
    tokenizer = make("gpt2")
    config = json.loads(tokenizer.to_str())
    config["pre_tokenizer"] = json.loads(make("llama3").to_str())["pre_tokenizer"]
    assert word_encoder(tokenizer, config) is None
