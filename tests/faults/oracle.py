"""Prompts of the fault tests and their right answers, computed without Tidemill by Hugging Face transformers."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

VOCAB_BYTES = 256


def prompts_of(case: str, count: int, length: int) -> list[list[int]]:
    """Prompts that no other case uses, so that nothing of them is cached; all of one length."""
    random_ids = random.Random(case)
    return [[random_ids.randrange(VOCAB_BYTES) for _ in range(length)] for _ in range(count)]


class Oracle:
    """Greedy answers of one checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        # The checkpoint's own limits of generation must not end an answer.
        self._model.generation_config.eos_token_id = None

    def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The continuation of each prompt; all prompts have one length."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
        return made[:, ids.shape[1] :].tolist()
