"""The highest rate of a trace at which a fleet keeps its targets."""

from collections.abc import Callable
from dataclasses import dataclass

from tidemill_bench.simulation.outcome import Outcome
from tidemill_bench.simulation.trace import TraceRequest


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Times that so large a share of the requests must keep."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    share: float = 0.95
    warm_up_requests: int = 0
    """The first so many fill the caches and are not judged."""

    def misses(self, request: TraceRequest, first_token_s: float, ended_s: float, speed: float) -> bool:
        """Whether one that ended so is judged and too slow."""
        if request.index < self.warm_up_requests:
            return False
        tpot_s = (ended_s - first_token_s) / max(1, request.output_tokens - 1)
        return first_token_s - request.arrival_s / speed > self.ttft_s or tpot_s > self.tpot_s

    def most_misses(self, requests: int) -> float:
        """Of so many requests, so many may miss."""
        return (1.0 - self.share) * (requests - self.warm_up_requests)


def highest_speed(
    run: Callable[[float], Outcome | None], *, first: float = 4.0, step: float = 2.0, within: float = 0.1
) -> tuple[float, Outcome]:
    """(speed, its outcome); the recorded rate is speed 1, `run` gives None where the targets are not kept.

    From `first` on the speed is changed by `step` until one is kept and the next is not, then the gap is halved.
    ValueError when the targets are not even kept at a hundredth of `first`.
    """
    good, bad = 0.0, 0.0
    best: Outcome | None = None
    speed = first
    while not good or not bad or bad / good > 1.0 + within:
        if speed < first / 100:
            raise ValueError(f"the targets are not kept at {speed} times the recorded rate")
        outcome = run(speed)
        if outcome is None:
            bad = speed
        else:
            good, best = speed, outcome
        speed = (good * bad) ** 0.5 if good and bad else good * step or bad / step
    assert best is not None, "a kept speed has an outcome"
    return good, best
