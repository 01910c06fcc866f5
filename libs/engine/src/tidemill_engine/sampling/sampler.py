"""One batched pass from logits to tokens; steps that no row asks for are left out.

Order: allowed tokens (constraint), logit bias, stop tokens before min_tokens, penalties, temperature, min-p, top-k,
top-p, draw. A draw inverts the cumulative distribution over token ids at one Philox uniform of (seed, position).
"""

from dataclasses import dataclass

import numpy as np
import torch

from tidemill_engine.sampling.constraint import Constraint, apply_mask
from tidemill_engine.sampling.filters import keep_mask
from tidemill_engine.sampling.logprobs import TokenLogprobs, token_logprobs
from tidemill_engine.sampling.penalties import PenaltyTables
from tidemill_engine.sampling.philox import uniform
from tidemill_engine.sampling.rows import SamplingRows
from tidemill_engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """Tokens of the rows that were asked for, in order."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    """By index among the rows."""
    errors: dict[int, str]
    """Constraints that cannot go on; these rows' tokens mean nothing."""


class Sampler:
    """Keeps what rows need between steps: parameters, penalty counts, constraints."""

    def __init__(self, num_rows: int, vocab_size: int, device: str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.params = SamplingRows(num_rows)
        self._penalties = PenaltyTables(num_rows, vocab_size, device)
        self._constraints: dict[int, Constraint] = {}

    def start(self, row: int, params: SamplingParams, token_ids: np.ndarray, prompt_tokens: int) -> None:
        """A request with these tokens (prompt, then output) enters a row."""
        self.params.set(row, params, self.vocab_size)
        self._constraints.pop(row, None)
        if self.params.has_penalty(np.array([row]))[0]:
            self._penalties.start(row, token_ids[:prompt_tokens], token_ids[prompt_tokens:])

    def constrain(self, row: int, constraint: Constraint) -> None:
        """Limits the row's tokens from now on."""
        self._constraints[row] = constraint

    def free(self, row: int) -> None:
        """The row's request ended."""
        self._constraints.pop(row, None)

    def is_plain(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """True when no row asks for more than a draw by its temperature."""
        params = self.params
        asks = params.has_penalty(rows) | params.has_bias[rows] | params.logprobs[rows]
        asks |= (params.top_k[rows] > 0) | (params.top_p[rows] < 1) | (params.min_p[rows] > 0)
        asks |= positions < params.min_tokens[rows]
        constrained = self._constraints and not self._constraints.keys().isdisjoint(rows.tolist())
        return not (constrained or asks.any())

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """logits [rows, vocab] float32, changed in place; `positions` = output tokens sampled so far."""
        wanting = np.flatnonzero(self.params.logprobs[rows])
        raw = logits[self._to_device(wanting)] if wanting.size else logits
        errors = self._apply_constraints(logits, rows)
        self._apply_bias(logits, rows)
        self._apply_min_tokens(logits, rows, positions)
        penalised = np.flatnonzero(self.params.has_penalty(rows))
        if penalised.size:
            self._penalties.apply(logits, penalised, rows[penalised], self.params)
        token_ids = self._choose(logits, rows, positions)
        if penalised.size:
            self._penalties.count(rows[penalised], token_ids[penalised])
        self._advance_constraints(rows, token_ids, errors)
        return Sampled(token_ids, self._logprobs(raw, wanting, rows, token_ids), errors)

    def _choose(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        drawing = np.flatnonzero(self.params.temperature[rows] > 0)
        if not drawing.size:
            return logits.argmax(dim=-1).cpu().numpy()
        if drawing.size == rows.size:
            return self._draw(logits, rows, positions)
        token_ids: np.ndarray = logits.argmax(dim=-1).cpu().numpy()
        token_ids[drawing] = self._draw(logits[self._to_device(drawing)], rows[drawing], positions[drawing])
        return token_ids

    def _draw(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        params = self.params
        temperature = self._to_device(params.temperature[rows])[:, None]
        # Below the smallest normal step a temperature is greedy in all but name; the quotient must stay finite.
        probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
        if (params.top_k[rows] > 0).any() or (params.top_p[rows] < 1).any() or (params.min_p[rows] > 0).any():
            limits = (self._to_device(values[rows]) for values in (params.top_k, params.top_p, params.min_p))
            probs = probs * keep_mask(probs, *limits)
        return draw(probs, self._to_device(uniform(params.seed[rows], positions)))

    def _apply_constraints(self, logits: torch.Tensor, rows: np.ndarray) -> dict[int, str]:
        places = [i for i, row in enumerate(rows.tolist()) if row in self._constraints] if self._constraints else []
        errors: dict[int, str] = {}
        if not places:
            return errors
        words = np.zeros((len(places), -(-self.vocab_size // 32)), np.int32)
        for i, place in enumerate(places):
            constraint = self._constraints[int(rows[place])]
            if not constraint.error:
                constraint.mask(words[i])
            if constraint.error:
                errors[place] = constraint.error
                words[i] = -1
        at = torch.tensor(places, device=self._device)
        masked = logits[at].cpu().numpy()
        apply_mask(masked, words)
        logits[at] = self._to_device(masked)
        return errors

    def _advance_constraints(self, rows: np.ndarray, token_ids: np.ndarray, errors: dict[int, str]) -> None:
        if not self._constraints:
            return
        for place, row in enumerate(rows.tolist()):
            constraint = self._constraints.get(row)
            if constraint is not None and place not in errors:
                constraint.advance([int(token_ids[place])])

    def _apply_bias(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        biased = np.flatnonzero(self.params.has_bias[rows])
        if not biased.size:
            return
        ids = [self.params.bias_ids[row] for row in rows[biased]]
        places = np.repeat(biased, [len(part) for part in ids])
        values = np.concatenate([self.params.bias_values[row] for row in rows[biased]])
        logits[self._to_device(places), self._to_device(np.concatenate(ids))] += self._to_device(values)

    def _apply_min_tokens(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        # A constraint knows by itself when the output may end, and at its end leaves nothing but a stop token.
        free = np.array([row not in self._constraints for row in rows.tolist()])
        early = np.flatnonzero((positions < self.params.min_tokens[rows]) & free)
        if not early.size:
            return
        ids = [self.params.stop_ids[row] for row in rows[early]]
        places = np.repeat(early, [len(part) for part in ids])
        logits[self._to_device(places), self._to_device(np.concatenate(ids))] = float("-inf")

    def _logprobs(
        self, raw: torch.Tensor, wanting: np.ndarray, rows: np.ndarray, token_ids: np.ndarray
    ) -> dict[int, TokenLogprobs]:
        if not wanting.size:
            return {}
        top_n = self.params.top_logprobs[rows[wanting]].tolist()
        entries = token_logprobs(raw, self._to_device(token_ids[wanting]), top_n)
        return dict(zip(wanting.tolist(), entries, strict=True))

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> np.ndarray:
    """First token id whose cumulative probability exceeds uniform * total; sums are float64."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    found: np.ndarray = torch.searchsorted(cumulative, target, right=True)[:, 0].cpu().numpy()
    return found
