"""Constraints by llguidance: JSON objects, JSON schemas and Lark grammars over the model's own tokenizer."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tidemill_engine.sampling.constraint import Constraint
from tidemill_engine.sampling_params import GrammarSpec

JSON_WHITESPACE = r"\n {0,16}| "
"""Between JSON's tokens: a space, or a line break and its indentation. Small models loop in unbounded whitespace."""
COMPILED_KEPT = 64
"""Grammars whose compiled form is kept for the next request."""


class GrammarCompiler:
    """Makes a fresh constraint for each request; loads the tokenizer at the first one."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compile = lru_cache(COMPILED_KEPT)(self._compile_uncached)

    def start(self, spec: GrammarSpec, consumed_token_ids: list[int]) -> Constraint:
        """A constraint that has seen these output tokens; a bad grammar shows in its `error`."""
        try:
            constraint = GrammarConstraint(self._compile(spec).deep_copy())
        except ValueError as error:
            return FailedConstraint(first_line(str(error)))
        constraint.advance(consumed_token_ids)
        return constraint

    def _compile_uncached(self, spec: GrammarSpec) -> LLMatcher:
        if self._tokenizer is None:
            path = str(self._model_dir / "tokenizer.json")
            self._tokenizer = LLTokenizer(path, self._vocab_size, eos_token_ids(self._model_dir))
        return LLMatcher(self._tokenizer, grammar_text(spec), log_level=0)


class GrammarConstraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error = first_line(matcher.get_error())

    def mask(self, out: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self.error = first_line(self._matcher.get_error())

    def advance(self, token_ids: list[int]) -> None:
        # After its end a grammar takes no further token; what follows a stop is not the grammar's to judge.
        if token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(token_ids)
            self.error = first_line(self._matcher.get_error())

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self.error = first_line(self._matcher.get_error())


class FailedConstraint:
    """Stands for a grammar that could not be read."""

    def __init__(self, error: str) -> None:
        self.error = error

    def mask(self, out: np.ndarray) -> None:
        """Never asked: the error comes first."""

    def advance(self, token_ids: list[int]) -> None:
        """Nothing can go on from an error."""

    def rollback(self, num_tokens: int) -> None:
        """Nothing was taken."""


def first_line(error: str) -> str:
    """What is wrong; the library goes on with the state of its parser."""
    return error.partition("\n")[0]


def grammar_text(spec: GrammarSpec) -> str:
    """llguidance's own form; raises ValueError for a schema that is not JSON."""
    if spec.kind == "lark":
        return str(LLMatcher.grammar_from_lark(spec.text))
    schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_WHITESPACE}))


def eos_token_ids(model_dir: Path) -> list[int]:
    """From generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        found: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    raise ValueError(f"{model_dir} names no eos_token_id, which constrained output needs")
