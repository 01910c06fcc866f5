"""What placement knows of one target, one (instance, cache domain)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.domain_track import Holder


@dataclass(frozen=True, slots=True)
class Claims:
    """Reservations that the target's load report cannot know of yet."""

    prefill_tokens: int = 0
    sequences: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target that may be chosen."""

    key: Holder
    domain: DomainRef
    endpoint: str
    total_blocks: int
    load: LoadReport = field(default_factory=LoadReport)
    age_s: float = float("inf")
    """Of the load report; infinite when there has been none."""
    unchanged_s: float = 0.0
    """Since the report's content last changed: the step that runs now is so old."""
    claims: Claims = Claims()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router needs of a ModelCard."""

    block_size: int
    kv_bytes_per_token: int
    """0: not known yet."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Assumptions and weights of the predictions; see RouterSettings for each."""

    direct_uncached_tokens: int = 16
    decode_high_water: float = 0.9
    expected_output_tokens: int = 256
    tie_fraction: float = 0.05
    work_weight: float = 1.0
    stale_load_s: float = 1.0
    stale_penalty_s: float = 2.0
    default_prefill_tokens_per_s: float = 500.0
    default_decode_step_s: float = 0.05
    default_transfer_bytes_per_s: float = 1e9
    measure_half_life_s: float = 30.0
    l2_bytes_per_s: float = 10e9
    best_prefill_tokens_per_s: float = 0.0
    best_decode_step_s: float = 0.0
    """No settings: the best of what the targets at hand measured; 0: none has."""


def staleness_s(candidate: Candidate, costs: Costs) -> float:
    """Penalty for an old load report: none while fresh, the most at ten times `stale_load_s`, never a refusal."""
    overdue = candidate.age_s / costs.stale_load_s - 1.0
    return costs.stale_penalty_s * min(1.0, max(0.0, overdue / 9.0))


def prefill_rate(candidate: Candidate, costs: Costs) -> float:
    """Tokens a second."""
    measured = _measured_rate(candidate) or costs.default_prefill_tokens_per_s
    return _aged(measured, max(measured, costs.best_prefill_tokens_per_s), candidate, costs)


def decode_step_s(candidate: Candidate, costs: Costs) -> float:
    """Seconds of a decode step."""
    measured = _measured_step(candidate) or costs.default_decode_step_s
    return _aged(measured, min(measured, costs.best_decode_step_s or measured), candidate, costs)


def transfer_rate(candidate: Candidate, costs: Costs) -> float:
    """Bytes a second."""
    return _measured_transfer(candidate) or costs.default_transfer_bytes_per_s


def learn_from_peers(candidates: Sequence[Candidate], costs: Costs) -> Costs:
    """Costs whose defaults are the medians of what these targets measured: a new one is taken to be like its peers.

    The best of them are noted as well: what an idle target measured long ago drifts towards the best (`_aged`).
    """
    return replace(
        costs,
        default_prefill_tokens_per_s=_median(map(_measured_rate, candidates), costs.default_prefill_tokens_per_s),
        default_decode_step_s=_median(map(_measured_step, candidates), costs.default_decode_step_s),
        default_transfer_bytes_per_s=_median(map(_measured_transfer, candidates), costs.default_transfer_bytes_per_s),
        best_prefill_tokens_per_s=max(map(_measured_rate, candidates), default=0.0),
        best_decode_step_s=min(filter(None, map(_measured_step, candidates)), default=0.0),
    )


def _aged(measured: float, best: float, candidate: Candidate, costs: Costs) -> float:
    """A measure of a target that has done nothing since: it may have met a bad moment, and only work can tell.

    Without this a target that was slow once would never be chosen, and so never measured, again.
    """
    weight = math.pow(0.5, candidate.unchanged_s / costs.measure_half_life_s)
    return weight * measured + (1.0 - weight) * best


def _measured_rate(candidate: Candidate) -> float:
    return _plausible(candidate.load.prefill_tokens_per_s, 0.1, 1e9)


def _measured_step(candidate: Candidate) -> float:
    return _plausible(candidate.load.decode_step_s, 1e-6, 600.0)


def _measured_transfer(candidate: Candidate) -> float:
    return _plausible(candidate.load.transfer_bytes_per_s, 1e3, 1e13)


def _plausible(reported: float, least: float, most: float) -> float:
    """A measure as a worker reports it; 0 where it reports none, or nonsense."""
    return reported if least <= reported <= most else 0.0


def _median(measures: Iterable[float], default: float) -> float:
    known = [measure for measure in measures if measure]
    return median(known) if known else default
