"""The seam between the sampler and whatever limits a row's next token."""

from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Follows one row's output."""

    error: str
    """Not empty once the constraint cannot go on."""

    def mask(self, out: np.ndarray) -> None:
        """Fills int32 words with one bit for each token, 1 = allowed."""

    def advance(self, token_ids: list[int]) -> None:
        """Takes tokens of the output; sets `error` when one is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""


def apply_mask(logits: np.ndarray, words: np.ndarray) -> None:
    """-inf for each token of [rows, vocab] whose bit in [rows, ceil(vocab / 32)] is 0."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    logits[bits == 0] = -np.inf
