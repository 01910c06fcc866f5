import itertools

import pytest
from gateway_emulated import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.worker_pb2 import Logprobs
from tidemill_gateway.text.choice_text import ChoiceText
from tidemill_gateway.text.stop_strings import StopStrings
from tidemill_gateway.text.token_bytes import TokenBytes

BYTES = TokenBytes(byte_tokenizer())
LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, the longer of two that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None]:
    machine = StopStrings(stops)
    shown = ""
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, end in itertools.pairwise(borders):
        match = machine.push(text[start:end])
        shown += match.text
        if match.stop_string is not None:
            return shown, match.stop_string
    return shown + machine.finish(), None


@given(LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=24))
def test_the_result_does_not_depend_on_where_text_is_cut(text, stops, cuts):
    assert run(text, stops, cuts) == expected(text, stops)


@given(LETTERS, STOPS)
def test_only_a_proper_prefix_of_a_stop_string_is_held_back(text, stops):
    machine = StopStrings(stops)
    shown = ""
    for i, character in enumerate(text):
        match = machine.push(character)
        shown += match.text
        if match.stop_string is not None:
            return
        held = text[len(shown) : i + 1]
        assert held == "" or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


def test_a_long_stop_string_that_never_begins_delays_nothing():
    machine = StopStrings(["X" * 200])
    assert [machine.push(c).text for c in "hello"] == list("hello")


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_held_tail_is_flushed_at_the_end(cut):
    text = "answer\n\nUser"[: 6 + cut]
    machine = StopStrings(["\n\nUser:"])
    assert machine.push(text).text + machine.finish() == text


def choice(stops: list[str]) -> ChoiceText:
    return ChoiceText(BYTES, stops, {258})


@given(LETTERS, STOPS, st.integers(1, 5))
def test_streamed_text_and_tokens_equal_those_at_once(text, stops, step):
    data = list(text.encode())
    once = choice(stops)
    whole = once.push(data, [Logprobs(rank=i) for i in range(len(data))])
    if not whole.stop_string:
        tail = once.finish()
        whole.text, whole.token_ids = whole.text + tail.text, whole.token_ids + tail.token_ids
        whole.logprobs = whole.logprobs + tail.logprobs
    streamed, shown_text, shown_ids, ranks = choice(stops), "", [], []
    stop = ""
    for start in range(0, len(data), step):
        part = data[start : start + step]
        delta = streamed.push(part, [Logprobs(rank=start + i) for i in range(len(part))])
        shown_text, shown_ids = shown_text + delta.text, shown_ids + delta.token_ids
        ranks += [entry.rank for entry in delta.logprobs]
        stop = delta.stop_string
        if stop:
            break
    if not stop:
        tail = streamed.finish()
        shown_text, shown_ids = shown_text + tail.text, shown_ids + tail.token_ids
        ranks += [entry.rank for entry in tail.logprobs]
    assert (shown_text, shown_ids, stop) == (whole.text, whole.token_ids, whole.stop_string)
    assert ranks == [entry.rank for entry in whole.logprobs] == list(range(len(shown_ids)))
    assert bytes(shown_ids).decode() == shown_text


def test_tokens_after_the_stop_string_are_neither_shown_nor_charged():
    text = choice(["cd"])
    delta = text.push(list(b"abcdef"), [])
    assert (delta.text, bytes(delta.token_ids), delta.stop_string) == ("ab", b"ab", "cd")
    assert text.num_tokens == 4


def test_a_stop_token_is_charged_but_has_no_text():
    text = choice([])
    delta = text.push([97, 258], [])
    assert (delta.text, delta.token_ids, text.num_tokens) == ("a", [97, 258], 2)
