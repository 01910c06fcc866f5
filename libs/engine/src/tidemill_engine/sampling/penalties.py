"""Repetition, presence and frequency penalties over count tables that grow with the output."""

import numpy as np
import torch

from tidemill_engine.sampling.rows import SamplingRows


class PenaltyTables:
    """Which tokens each row's prompt has and how often its output used each; made when a row first needs them."""

    def __init__(self, num_rows: int, vocab_size: int, device: str = "cpu") -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._in_prompt: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def start(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Fills a row that has penalties."""
        in_prompt, counts = self._tables()
        in_prompt[row].zero_()
        in_prompt[row, self._to_device(prompt_ids)] = True
        counts[row].copy_(torch.from_numpy(np.bincount(output_ids, minlength=self._shape[1])))

    def count(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds one sampled token for each of the rows (all different, all with penalties)."""
        _, counts = self._tables()
        counts[self._to_device(rows), self._to_device(token_ids)] += 1

    def apply(self, logits: torch.Tensor, places: np.ndarray, rows: np.ndarray, params: SamplingRows) -> None:
        """Changes logits[places] in place; `rows` are the table rows of these places."""
        in_prompt, counts = self._tables()
        at, index = self._to_device(places), self._to_device(rows)
        used = counts[index]
        seen = in_prompt[index] | (used > 0)
        values = logits[at]
        repetition = self._to_device(params.repetition[rows])[:, None]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen, repeated, values)
        values -= self._to_device(params.frequency[rows])[:, None] * used
        values -= self._to_device(params.presence[rows])[:, None] * (used > 0)
        logits[at] = values

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._in_prompt is None or self._output_counts is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._output_counts
