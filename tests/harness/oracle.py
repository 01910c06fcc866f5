"""Prompts and their right answers, computed without Tidemill by Hugging Face transformers."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

VOCAB_BYTES = 256
LEAD = 1e-4
"""By which the likeliest token's logit leads: sums in another order, as in a larger batch, move float32 logits of the
tiny checkpoints by some 1e-6, and of two that are as likely each may be the right one."""


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

    def cases(self, case: str, count: int, length: int, max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts that no other case uses and the one right answer of each."""
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        draw = 0
        while len(prompts) < count:
            drawn = prompts_of(f"{case}/{draw}" if draw else case, count - len(prompts), length)
            for prompt, answer, lead in zip(drawn, *self._answers(drawn, max_tokens), strict=True):
                if lead > LEAD:
                    prompts.append(prompt)
                    answers.append(answer)
            draw += 1
        return prompts, answers

    def _answers(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], list[float]]:
        """The continuation of each prompt, and the least lead of any of its tokens; all prompts have one length."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            best = torch.stack(made.logits).topk(2).values
            leads = (best[..., 0] - best[..., 1]).amin(0)
        return made.sequences[:, ids.shape[1] :].tolist(), leads.tolist()
