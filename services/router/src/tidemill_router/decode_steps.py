"""Seconds of a target's decode step with one request more: by its report's cost model, for the batch that it has now.

What a target measured tells of the batch that it had then. Were that taken for what the next request will get, one that
was full once and is idle now would be avoided, and by that measure nothing new.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from tidemill_kvcache.step_cost import StepCost
from tidemill_kvcache.step_cost_message import from_message
from tidemill_router.candidate import Candidate, Costs, aged, beyond_noise, decode_step_s, plausible_step

STEP_GROWTH_PER_SEQUENCE = 0.1
"""How much one more sequence is taken to lengthen a measured step, where no cost model is known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests on a target; beyond its seats they take turns."""

    rows: float
    context_tokens: float
    """Of all rows."""
    seats: int
    """0: not said."""

    def step_s(self, cost: StepCost) -> float:
        """Seconds between two tokens of one of them; 0: not known, or nonsense."""
        turns = max(1.0, self.rows / self.seats) if self.seats > 0 else 1.0
        return plausible_step(turns * cost.decode_step_s(self.rows / turns, self.context_tokens / turns))


def batch_with(candidate: Candidate, context_tokens: int, block_size: int) -> Batch:
    """The target's batch once it also has a request of so many tokens."""
    load, claims = candidate.load, candidate.claims
    rows = load.running_requests + load.waiting_requests + claims.sequences + 1
    return Batch(rows, load.context_tokens + claims.blocks * block_size + context_tokens, load.max_num_seqs)


def predict_steps(candidates: Sequence[Candidate], batches: Sequence[Batch], costs: Costs) -> list[float]:
    """Seconds of a step on each target; what its model says beyond noise, and less of that the longer it has had
    nothing to learn from."""
    models = [from_message(candidate.load.step_cost) for candidate in candidates]
    usual, best = _usual_and_best(models, batches)
    return [
        _step_s(candidate, batch.step_s(model), batch.step_s(usual), batch.step_s(best), costs)
        for candidate, batch, model in zip(candidates, batches, models, strict=True)
    ]


def _step_s(candidate: Candidate, own_s: float, usual_s: float, best_s: float, costs: Costs) -> float:
    if not own_s and (candidate.load.decode_step_s or not usual_s):
        return decode_step_s(candidate, costs) * (1.0 + STEP_GROWTH_PER_SEQUENCE * (candidate.claims.sequences + 1))
    predicted_s = beyond_noise(own_s or usual_s, usual_s, costs)
    return aged(predicted_s, min(predicted_s, best_s or predicted_s), candidate, costs)


def _usual_and_best(models: Sequence[StepCost], batches: Sequence[Batch]) -> tuple[StepCost, StepCost]:
    """The median model and the quickest, compared where all have to predict: at the mean of the batches. All zero
    where no target knows its own."""
    if not models:
        return StepCost(), StepCost()
    common = Batch(fmean(batch.rows for batch in batches), fmean(batch.context_tokens for batch in batches), 0)
    known = sorted(((common.step_s(model), index) for index, model in enumerate(models)))
    known = [(step_s, index) for step_s, index in known if step_s]
    if not known:
        return StepCost(), StepCost()
    low, high = known[(len(known) - 1) // 2], known[len(known) // 2]
    return _mean(models[low[1]], models[high[1]]), models[known[0][1]]


def _mean(one: StepCost, other: StepCost) -> StepCost:
    return StepCost(*map(fmean, zip(astuple(one), astuple(other), strict=True)))
