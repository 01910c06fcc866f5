"""What a replay gave, request by request, and its figures."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """Arrays of one value for each finished request, in order of the trace."""

    arrival_s: Floats
    input_tokens: Floats
    cached_l1: Floats
    cached_l2: Floats
    cached_l3: Floats
    ttft_s: Floats
    tpot_s: Floats
    engine: npt.NDArray[np.int64]
    finished_s: Floats

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were not computed, of all."""
        return float((self.cached_l1 + self.cached_l2 + self.cached_l3).sum() / self.input_tokens.sum())

    def tier_rate(self, tier: int) -> float:
        """Prompt tokens that came from one tier (1, 2, 3), of all."""
        cached = (self.cached_l1, self.cached_l2, self.cached_l3)[tier - 1]
        return float(cached.sum() / self.input_tokens.sum())

    @property
    def imbalance(self) -> float:
        """Computed prompt tokens of the busiest engine over the mean."""
        computed = self.input_tokens - self.cached_l1 - self.cached_l2 - self.cached_l3
        by_engine = np.bincount(self.engine, weights=computed)
        return float(by_engine.max() / by_engine.mean())

    def after(self, count: int) -> "Outcome":
        """Without the first so many requests."""
        return Outcome(*(getattr(self, entry.name)[count:] for entry in fields(self)))

    @property
    def requests_per_s(self) -> float:
        """Requests over the time in which they came."""
        return (len(self.ttft_s) - 1) / float(self.arrival_s.max() - self.arrival_s.min())

    def ttft_ms(self, quantile: float) -> float:
        """A quantile of the time to the first token."""
        return float(np.quantile(self.ttft_s, quantile)) * 1e3

    @property
    def mean_ttft_ms(self) -> float:
        """Mean time to the first token."""
        return float(self.ttft_s.mean()) * 1e3

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Share of the requests within both targets."""
        return float(np.mean((self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)))
