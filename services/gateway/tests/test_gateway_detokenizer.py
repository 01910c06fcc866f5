import pytest
from gateway_emulated import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tidemill_gateway.text.detokenizer import Detokenizer, detokenize
from tidemill_gateway.text.token_bytes import TokenBytes, UnsupportedTokenizer

BYTES = TokenBytes(byte_tokenizer())


def byte_fallback_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "▁he": 2, "llo": 3, "é": 4}
    vocab |= {f"<0x{b:02X}>": 5 + b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


FALLBACK_TOKENIZER = byte_fallback_tokenizer()
FALLBACK = TokenBytes(FALLBACK_TOKENIZER)


def pieces(token_bytes: TokenBytes, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(token_bytes)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]


@given(st.lists(st.integers(0, 263), max_size=64))
def test_joined_pieces_equal_the_full_decoding_of_any_bytes(token_ids):
    assert "".join(pieces(BYTES, token_ids)) == detokenize(BYTES, token_ids)


@given(st.lists(st.integers(0, 255), max_size=64))
def test_the_full_decoding_is_the_tokenizers_own(token_ids):
    assert detokenize(BYTES, token_ids) == byte_tokenizer().decode(token_ids)


@given(st.text(max_size=40))
def test_no_replacement_character_appears_for_valid_text(text):
    shown = pieces(BYTES, list(text.encode()))
    assert "".join(shown) == text
    assert all("�" not in piece for piece in shown) or "�" in text


@given(st.text(alphabet="a é😀漢", max_size=20), st.integers(0, 80))
def test_a_character_cut_by_the_end_is_one_replacement(text, cut):
    data = text.encode()[:cut]
    assert "".join(pieces(BYTES, list(data))) == data.decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_byte_fallback_tokens_join_to_characters(text):
    token_ids = [5 + b for b in text.encode()]
    assert "".join(pieces(FALLBACK, token_ids)) == text.removeprefix(" ")


def test_sentencepiece_spaces_become_spaces_and_the_first_is_stripped():
    assert "".join(pieces(FALLBACK, [2, 3, 1, 2, 3])) == "hello  hello"
    assert FALLBACK_TOKENIZER.decode([2, 3, 1, 2, 3]) == "hello  hello"


def test_special_tokens_have_no_text_but_a_name():
    assert pieces(BYTES, [72, 258, 73]) == ["H", "", "I", ""]
    assert BYTES.display_bytes(258) == b"<|im_end|>"


def test_a_decoder_of_unknown_kind_is_refused_by_name():
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        TokenBytes(tokenizer)
