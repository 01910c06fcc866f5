"""Prompts of the serving benchmark."""

import random
from typing import Any


def shared_prefix_prompts(
    count: int, *, prompt_tokens: int, shared_tokens: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Random token ids: all prompts of one call start with the same `shared_tokens` tokens.

    Ids of the first 1,000 (control and single-byte tokens of common vocabularies) are left out.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(1000, vocab_size) for _ in range(shared_tokens)]
    tail = prompt_tokens - shared_tokens
    return [shared + [rng.randrange(1000, vocab_size) for _ in range(tail)] for _ in range(count)]


def completion_body(model: str, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """A greedy completion of exactly `output_tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
