"""Plain recomputes of tiny checkpoints, and what a served greedy answer must hold against them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from tidemill.completion import CompletedChoice

VOCAB_BYTES = 256
# Largest error of a log-probability by type of KV, some times what is measured on the tiny checkpoints.
FP32_BOUND = 2e-3
BF16_BOUND = 0.2


class Reference(Protocol):
    """Something that computes a sequence whole."""

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] logits of every position."""


class Transformers:
    """A checkpoint run by Hugging Face transformers in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] logits of every position."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0]


def prompt_of(name: str, length: int) -> list[int]:
    """Random tokens that depend on the name only."""
    drawn = random.Random(name)
    return [drawn.randrange(VOCAB_BYTES) for _ in range(length)]


def check_greedy(reference: Reference, prompt: Sequence[int], choice: CompletedChoice, bound: float) -> None:
    """Teacher-forced: each token is the likeliest after those before it, or within twice the bound of the likeliest;
    each log-probability is within the bound."""
    assert len(choice.logprobs) == len(choice.token_ids) > 0
    logits = reference.logits([*prompt, *choice.token_ids[:-1]])[len(prompt) - 1 :]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    behind = logprobs.max(-1).values - chosen
    wrong = [int(at) for at in (behind > 2 * bound).nonzero()]
    assert not wrong, f"wrong tokens at {wrong} of {len(choice.token_ids)}"
    errors = (torch.tensor([given.logprob for given in choice.logprobs]) - chosen).abs()
    assert errors.max() <= bound, f"log-probability off by {errors.max():.4f} at {int(errors.argmax())}"
