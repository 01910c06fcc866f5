"""What placement knows of one target, one (instance, cache domain)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.step_cost_message import from_message

USUAL_CHUNK_TOKENS = 1024
"""At which instances are compared, if their steps can be so large."""


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
    idle_s: float = 0.0
    """Since it last had anything to do: what it measured is at least so old."""
    claims: Claims = Claims()
    computed_tokens: int = 0
    """Of prompts that the report may still count as waiting, though their first token has come."""
    recent_tokens: float = 0.0
    """Prompt tokens that it was lately given to compute (see Turnover)."""
    kv_format: str = ""
    """Of its KV; empty: it does not say."""
    tells_snapshots: bool = False
    """Its events say which of its blocks have a snapshot."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router needs of a ModelCard."""

    block_size: int
    kv_bytes_per_token: int
    """0: not known yet."""
    snapshot_interval_blocks: int = 0
    """Where the model keeps a window or a state for each sequence, a prefix is reused to a multiple of it only."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Assumptions and weights of the predictions; see RouterSettings for each."""

    direct_uncached_tokens: int = 16
    decode_high_water: float = 0.9
    expected_output_tokens: int = 256
    tie_fraction: float = 0.05
    work_weight: float = 2.0
    stale_load_s: float = 1.0
    stale_penalty_s: float = 2.0
    default_prefill_tokens_per_s: float = 500.0
    default_decode_step_s: float = 0.05
    default_transfer_bytes_per_s: float = 1e9
    measure_half_life_s: float = 30.0
    measure_noise: float = 0.25
    l2_bytes_per_s: float = 10e9
    fetch_latency_s: float = 0.02
    peer_fetch: bool = True
    peer_latency_s: float = 0.02
    usual_prefill_tokens_per_s: float = 0.0
    best_prefill_tokens_per_s: float = 0.0
    best_decode_step_s: float = 0.0
    """No settings: the median and the best of what the targets at hand measured; 0: none has."""


def staleness_s(candidate: Candidate, costs: Costs) -> float:
    """Penalty for an old load report: none while fresh, the most at ten times `stale_load_s`, never a refusal."""
    overdue = candidate.age_s / costs.stale_load_s - 1.0
    return costs.stale_penalty_s * min(1.0, max(0.0, overdue / 9.0))


def prefill_rate(candidate: Candidate, costs: Costs) -> float:
    """Tokens a second."""
    measured = (
        beyond_noise(_measured_rate(candidate), costs.usual_prefill_tokens_per_s, costs)
        or costs.default_prefill_tokens_per_s
    )
    return aged(measured, max(measured, costs.best_prefill_tokens_per_s), candidate, costs)


def decode_step_s(candidate: Candidate, costs: Costs) -> float:
    """Seconds of a decode step, as measured."""
    measured = _measured_step(candidate) or costs.default_decode_step_s
    return aged(measured, min(measured, costs.best_decode_step_s or measured), candidate, costs)


def transfer_rate(candidate: Candidate, costs: Costs) -> float:
    """Bytes a second."""
    return _measured_transfer(candidate) or costs.default_transfer_bytes_per_s


def learn_prefill(candidates: Sequence[Candidate], costs: Costs) -> Costs:
    """Costs whose defaults are the medians of what these targets measured: a new one is taken to be like its peers.

    The best of them is noted as well: what an idle target measured long ago drifts towards the best (`aged`).
    """
    rates = list(map(_measured_rate, candidates))
    usual = _median(rates, 0.0)
    costs = replace(costs, usual_prefill_tokens_per_s=usual)
    return replace(
        costs,
        default_prefill_tokens_per_s=usual or costs.default_prefill_tokens_per_s,
        default_transfer_bytes_per_s=_median(map(_measured_transfer, candidates), costs.default_transfer_bytes_per_s),
        best_prefill_tokens_per_s=beyond_noise(max(rates, default=0.0), usual, costs),
    )


def learn_decode(candidates: Sequence[Candidate], costs: Costs) -> Costs:
    """The same of what decode placement asks for."""
    steps = list(map(_measured_step, candidates))
    return replace(
        costs,
        default_decode_step_s=_median(steps, costs.default_decode_step_s),
        default_transfer_bytes_per_s=_median(map(_measured_transfer, candidates), costs.default_transfer_bytes_per_s),
        best_decode_step_s=min(filter(None, steps), default=0.0),
    )


def aged(measured: float, best: float, candidate: Candidate, costs: Costs) -> float:
    """A measure of a target that has done nothing since: it may have met a bad moment, and only work can tell.

    Without this a target that was slow once would never be chosen, and so never measured, again.
    """
    weight = math.pow(0.5, candidate.idle_s / costs.measure_half_life_s)
    return weight * measured + (1.0 - weight) * best


def beyond_noise(measured: float, usual: float, costs: Costs) -> float:
    """The usual measure, and of this one's distance from it what is more than noise; 0: nothing is measured.

    Equal instances measure by what they happened to compute. Taken at its word, the one that looks fastest would get
    every prompt that is cold everywhere.
    """
    if not measured or not usual:
        return measured
    distance = math.log(measured / usual)
    return usual * math.exp(math.copysign(max(0.0, abs(distance) - math.log1p(costs.measure_noise)), distance))


def _measured_rate(candidate: Candidate) -> float:
    """Of a usual chunk by the instance's cost model where it has one, whatever chunks it happened to compute.

    Never of a larger chunk than it computes: small steps cost about the same whatever their size, and a fit to those
    alone would promise that a step of any size does too, to the first of equal instances that learns it.
    """
    load = candidate.load
    rate = load.prefill_tokens_per_s
    if load.HasField("step_cost"):
        chunk = min(USUAL_CHUNK_TOKENS, load.max_num_batched_tokens or USUAL_CHUNK_TOKENS)
        chunk_s = from_message(load.step_cost).prefill_s(chunk, 0, chunk)
        rate = chunk / chunk_s if chunk_s > 0 else rate
    return _plausible(rate, 0.1, 1e9)


def _measured_step(candidate: Candidate) -> float:
    return plausible_step(candidate.load.decode_step_s)


def plausible_step(seconds: float) -> float:
    """Seconds of a step; 0 where they are none or nonsense."""
    return _plausible(seconds, 1e-6, 600.0)


def _measured_transfer(candidate: Candidate) -> float:
    return _plausible(candidate.load.transfer_bytes_per_s, 1e3, 1e13)


def _plausible(reported: float, least: float, most: float) -> float:
    """A measure as a worker reports it; 0 where it reports none, or nonsense."""
    return reported if least <= reported <= most else 0.0


def _median(measures: Iterable[float], default: float) -> float:
    known = [measure for measure in measures if measure]
    return median(known) if known else default
