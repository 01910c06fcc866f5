"""What an engine step costs, learnt from steps: one model for the scheduler, the load reports and whoever reads them.

    seconds = base + prefill_token * p + prefill_context * sum(chunk * context) + decode_row * d + decode_context * c

`p` prompt tokens and `d` decode rows in the step; the context of a chunk is counted at its middle, that of a decode row
is its length, so `c` is the sum over decode rows.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SCALES = np.array([1.0, 1e3, 1e6, 10.0, 1e4])
"""Size of each feature in a usual step, so that the fit is well conditioned."""
_LEAST_STEP_S, _LONGEST_STEP_S = 1e-6, 1e4
"""Measures outside are none."""
_RIDGE = np.array([1e-6, 1e-6, 1e-3, 1e-6, 1e-3])
"""Where steps do not tell features apart, contexts are the last to be charged."""
_USUAL_ERROR = 0.15
"""Relative error above which a step's weight falls."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    prefill_tokens: int = 0
    prefill_context: float = 0.0
    """Sum over chunks of tokens x context at the chunk's middle."""
    decode_rows: int = 0
    decode_context: int = 0
    """Sum of the decode rows' lengths."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds by feature; all zero: not known yet."""

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0

    @property
    def known(self) -> bool:
        """Whether steps can be predicted; those of one size may all be base."""
        return self.base_s > 0.0 or self.prefill_token_s > 0.0 or self.prefill_context_s > 0.0

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return (
            self.base_s
            + self.prefill_token_s * shape.prefill_tokens
            + self.prefill_context_s * shape.prefill_context
            + self.decode_row_s * shape.decode_rows
            + self.decode_context_s * shape.decode_context
        )

    def times(self, factor: float) -> "StepCost":
        """The cost on a machine so many times slower."""
        return StepCost(
            self.base_s * factor,
            self.prefill_token_s * factor,
            self.prefill_context_s * factor,
            self.decode_row_s * factor,
            self.decode_context_s * factor,
        )

    def prefill_s(self, num_tokens: int, start: int, chunk_tokens: int) -> float:
        """Seconds to compute the tokens [start, start + num_tokens) of one prompt in chunks; 0 while not known."""
        if num_tokens <= 0 or not self.known:
            return 0.0
        steps = -(-num_tokens // max(1, chunk_tokens))
        pairs = num_tokens * (start + num_tokens / 2)
        return self.base_s * steps + self.prefill_token_s * num_tokens + self.prefill_context_s * pairs

    def decode_step_s(self, rows: float, context_tokens: float) -> float:
        """Seconds of a step of decode rows alone, which is their time per token."""
        return self.base_s + self.decode_row_s * rows + self.decode_context_s * context_tokens


class StepCostLearner:
    """Non-negative least squares in relative error over recent steps, fitted anew now and then.

    Steps with and without prompt tokens are kept apart, so that no run of decode steps drives out what is known of
    prompts. A drift, the recent ratio of measured to fitted time, follows at once what slows or speeds the whole
    machine. A step far off the fit, such as a stall, counts little.
    """

    _WARM_UP_STEPS = 2
    _KEPT_STEPS = 192
    """Of each kind."""
    _FIT_EVERY = 32
    _FIT_EVERY_AT_FIRST = 4
    _DRIFT_WEIGHT = 0.1
    _MOST_SURPRISE = 2.0

    def __init__(self) -> None:
        self._fitted = StepCost()
        self._steps: tuple[deque[tuple[float, ...]], ...] = tuple(deque(maxlen=self._KEPT_STEPS) for _ in range(2))
        self._num_steps = 0
        self._drift = 1.0
        self.cost = StepCost()

    def observe(self, shape: StepShape, step_s: float) -> None:
        """A step took `step_s` seconds; the first ones, which pay for warming up, are left out."""
        self._num_steps += 1
        if self._num_steps <= self._WARM_UP_STEPS or not _LEAST_STEP_S < step_s < _LONGEST_STEP_S:
            return
        features = (1.0, shape.prefill_tokens, shape.prefill_context, shape.decode_rows, shape.decode_context)
        self._steps[shape.prefill_tokens > 0].append((*features, step_s))
        fitted_s = self._fitted.step_s(shape)
        if fitted_s > 0.0:
            surprise = min(max(step_s / fitted_s, self._drift / self._MOST_SURPRISE), self._drift * self._MOST_SURPRISE)
            self._drift += (surprise - self._drift) * self._DRIFT_WEIGHT
        every = self._FIT_EVERY if self._num_steps > 2 * self._FIT_EVERY else self._FIT_EVERY_AT_FIRST
        if self._num_steps % every == 0:
            self._fit(shape)
        self.cost = self._fitted.times(self._drift)

    def _fit(self, last: StepShape) -> None:
        """Fits anew; the drift goes on from where it was, told by the last step."""
        rows = np.array([*self._steps[0], *self._steps[1]])
        features = rows[:, :-1] / _SCALES / rows[:, -1:]
        weights = _robust_fit(features)
        expected_s = self._fitted.step_s(last) * self._drift
        self._fitted = StepCost(*(weights / _SCALES).tolist())
        now_s = self._fitted.step_s(last)
        known = expected_s > 0.0 and now_s > 0.0
        self._drift = min(max(expected_s / now_s, 1 / self._MOST_SURPRISE), self._MOST_SURPRISE) if known else 1.0


def _robust_fit(features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A fit, and one more with less weight on what the first left far off."""
    weights = _non_negative_fit(features, np.ones(len(features)))
    error = np.abs(features @ weights - 1.0)
    return _non_negative_fit(features, np.minimum(1.0, _USUAL_ERROR / np.maximum(error, 1e-9)))


def _non_negative_fit(features: npt.NDArray[np.float64], trust: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Weights >= 0 that bring `features @ weights` close to 1, shapes (n, k) and (n,) -> (k,); drops what turns out
    negative, the worst first."""
    gram = (features * trust[:, None]).T @ features
    target = (features * trust[:, None]).sum(axis=0)
    used = np.flatnonzero(np.diag(gram) > 0.0)
    gram[np.diag_indices_from(gram)] *= 1.0 + _RIDGE
    weights = np.zeros(len(target))
    while len(used):
        found = np.linalg.lstsq(gram[np.ix_(used, used)], target[used], rcond=None)[0]
        if found.min() >= 0.0:
            weights[used] = found
            break
        used = np.delete(used, int(found.argmin()))
    return weights
