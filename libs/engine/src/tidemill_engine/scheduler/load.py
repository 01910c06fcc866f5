"""What a domain tells about its load: counters, predictions and fresh percentiles."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill_engine.step_cost import MeasuredCost

_FRESH_S = 30.0
_MAX_SAMPLES = 512
_QUANTILE = 0.9


class FreshPercentile:
    """Upper percentile of the samples of the last seconds; 0 when there is none."""

    def __init__(self, fresh_s: float = _FRESH_S) -> None:
        self._fresh_s = fresh_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now_s: float, sample: float) -> None:
        """Takes a sample in."""
        self._samples.append((now_s, sample))

    def value(self, now_s: float) -> float:
        """The percentile now."""
        while self._samples and self._samples[0][0] < now_s - self._fresh_s:
            self._samples.popleft()
        ordered = sorted(sample for _, sample in self._samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * _QUANTILE))] if ordered else 0.0


@dataclass
class LoadTracker:
    """Cumulative counters and measures of one domain."""

    cost: MeasuredCost = field(default_factory=MeasuredCost)
    ttft_s: FreshPercentile = field(default_factory=FreshPercentile)
    tpot_s: FreshPercentile = field(default_factory=FreshPercentile)
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    runaways_total: int = 0
    overdue_reservations_total: int = 0
    """Blocks kept for a transfer whose end nobody reported."""

    def predicted_tpot_s(self, decoding: Sequence[int], max_decode_rows: int) -> float:
        """Seconds between tokens of requests of these lengths; rows that do not fit in one step take turns.

        Without any, of one alone: what the last steps took says nothing of a batch that has ended since.
        """
        turns = max(1.0, len(decoding) / max(1, max_decode_rows))
        if not self.cost.model.known or not self.cost.step_with_decode_s:
            return self.cost.step_with_decode_s * turns
        return self.cost.model.decode_step_s(max(1, len(decoding)), sum(decoding))
