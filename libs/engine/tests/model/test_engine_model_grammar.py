"""Constrained output: what the sampler lets through is always a word of the grammar."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tidemill_engine.sampling.constraint import apply_mask
from tidemill_engine.sampling_params import GrammarSpec, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EOS = 258


def spec(kind: str, text: str) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, digest=kind + text)  # type: ignore[arg-type]


def constrained(kind: str, text: str, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=spec(kind, text), stop_token_ids=[EOS], **fields)


def generate_text(driver: Any, row: int, checkpoint: Path, limit: int = 200) -> str:
    first = driver.prefill(row)
    while driver.tokens[row][-1] != EOS and limit:
        driver.step({row: 1})
        limit -= 1
    assert first.grammar_error == ""
    made = driver.tokens[row][driver.prompt_length :]
    return str(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(made))


@pytest.fixture
def driver(tiny: Callable[..., Path], start_runner: Callable[..., Any]) -> Any:
    made = start_runner(tiny("qwen3"))
    made.prompt_length = 3
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_json_schema_is_obeyed(driver: Any, tiny: Callable[..., Path], temperature: float) -> None:
    driver.add(0, [65, 66, 67], constrained("json_schema", json.dumps(SCHEMA), temperature=temperature, seed=5))
    value = json.loads(generate_text(driver, 0, tiny("qwen3")))
    assert value["name"] in ("ada", "bob")
    assert 0 <= value["age"] <= 99


def test_a_lark_grammar_is_obeyed(driver: Any, tiny: Callable[..., Path]) -> None:
    driver.add(0, [65, 66, 67], constrained("lark", 'start: "yes" | "no, " /[0-9]{3}/', temperature=2.0, seed=3))
    text = generate_text(driver, 0, tiny("qwen3"))
    assert text == "yes" or (text.startswith("no, ") and len(text) == 7)


def test_a_json_object_starts_as_one(driver: Any, tiny: Callable[..., Path]) -> None:
    driver.add(0, [65, 66, 67], constrained("json_object", "", temperature=1.0, seed=11))
    assert generate_text(driver, 0, tiny("qwen3"), limit=20).lstrip().startswith("{")


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_a_json_object_is_whole_when_it_ends(driver: Any, tiny: Callable[..., Path], seed: int) -> None:
    # Random weights seldom end a string or an object by themselves.
    tokenizer = Tokenizer.from_file(str(tiny("qwen3") / "tokenizer.json"))
    ends = {tokenizer.token_to_id(end): 6.0 for end in ('"', "}", "]")}
    driver.add(0, [65, 66, 67], constrained("json_object", "", temperature=1.0, seed=seed, logit_bias=ends))
    value = json.loads(generate_text(driver, 0, tiny("qwen3"), limit=300))
    assert isinstance(value, dict)
    assert value
    assert driver.tokens[0][-1] == EOS


def test_an_unconstrained_neighbour_is_not_touched(driver: Any, tiny: Callable[..., Path]) -> None:
    driver.add(1, [70, 71, 72], SamplingParams(temperature=0.0))
    free = driver.generate(1, 8)
    driver.free(1)
    driver.add(0, [65, 66, 67], constrained("json_schema", json.dumps(SCHEMA), temperature=1.0))
    driver.add(2, [70, 71, 72], SamplingParams(temperature=0.0))
    driver.prefill(0)
    driver.prefill(2)
    for _ in range(7):
        driver.step({0: 1, 2: 1})
    assert driver.tokens[2][3:] == free


def test_a_resumed_request_goes_on_in_the_middle_of_its_grammar(driver: Any, tiny: Callable[..., Path]) -> None:
    params = constrained("json_schema", json.dumps(SCHEMA), temperature=1.2, seed=77)
    driver.add(0, [65, 66, 67], params)
    whole = generate_text(driver, 0, tiny("qwen3"))
    tokens = list(driver.tokens[0])
    driver.free(0)
    middle = 3 + 6
    driver.add(4, tokens[:middle], params, prompt_tokens=3, grammar_consumed_token_ids=tokens[3:middle])
    assert generate_text(driver, 4, tiny("qwen3")) == whole


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", "start: nothing"),
        ("json_schema", '{"type": "quark"}'),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", "{"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_an_error_of_its_request_alone(driver: Any, kind: str, text: str) -> None:
    driver.add(0, [65, 66, 67], constrained(kind, text))
    driver.add(1, [70, 71, 72], SamplingParams(temperature=0.0))
    sampled = driver.step({0: 3, 1: 3})
    assert sampled[0].grammar_error
    assert "\n" not in sampled[0].grammar_error, "the state of the parser is nobody's to read"
    assert sampled[0].token_ids == []
    assert len(sampled[1].token_ids) == 1


def test_replayed_tokens_outside_the_grammar_are_an_error(driver: Any) -> None:
    driver.add(
        0, [65, 66, 67, 68], constrained("lark", 'start: "yes"'), prompt_tokens=3, grammar_consumed_token_ids=[68]
    )
    assert driver.prefill(0).grammar_error


def test_mask_bits_count_from_the_low_end_of_each_word() -> None:
    logits = np.zeros((2, 70), np.float32)
    words = np.zeros((2, 3), np.int32)
    words[0, 0], words[0, 2], words[1, 1] = 1 << 5, 1 << 3, -1
    apply_mask(logits, words)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [5, 67]
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == list(range(32, 64))


def test_min_tokens_does_not_keep_a_finished_grammar_open(driver: Any, tiny: Callable[..., Path]) -> None:
    driver.add(0, [65, 66, 67], constrained("lark", 'start: "yes"', temperature=1.0, min_tokens=10))
    assert generate_text(driver, 0, tiny("qwen3"), limit=10) == "yes"
    assert driver.tokens[0][-1] == EOS
