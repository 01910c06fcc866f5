"""Where a prompt is computed: predicted seconds to the first token, by instance."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import (
    Candidate,
    Costs,
    ModelFacts,
    learn_from_peers,
    prefill_rate,
    staleness_s,
    transfer_rate,
)
from tidemill_router.pick import pick

FETCH_LATENCY_S = 0.005
"""Of one fetch from L2 or L3, beside its bytes."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """Leading blocks of the prompt that a target has, or will have."""

    depth: TierDepth = field(default_factory=TierDepth)
    pending_blocks: int = 0
    """Leading blocks that placements still under way will leave in L1."""
    shared_l3_blocks: int = 0
    """Leading blocks that kvstore has for everybody."""


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """Prediction for one target; `score_s` orders the targets, `total_s` is the predicted TTFT."""

    candidate: Candidate
    cached_l1_tokens: int
    cached_l2_tokens: int
    cached_l3_tokens: int
    uncached_tokens: int
    queue_s: float
    compute_s: float
    fetch_l2_s: float
    fetch_l3_s: float
    staleness_s: float
    score_s: float

    @property
    def total_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.queue_s + self.compute_s + self.fetch_l2_s + self.fetch_l3_s + self.staleness_s

    def terms(self) -> dict[str, float]:
        """Why, in seconds by name."""
        return {
            "queue": self.queue_s,
            "compute": self.compute_s,
            "fetch_l2": self.fetch_l2_s,
            "fetch_l3": self.fetch_l3_s,
            "staleness": self.staleness_s,
            "total": self.total_s,
        }


def estimate_prefill(
    candidate: Candidate, prompt_tokens: int, facts: ModelFacts, warmth: Warmth, costs: Costs
) -> PrefillEstimate:
    """Predicts one target; blocks below L1 count as cached where fetching them beats computing them."""
    rate = prefill_rate(candidate, costs)
    # The last token is always computed, for its logits.
    usable = max(0, prompt_tokens - 1)
    depth, size = warmth.depth, facts.block_size
    l1 = min(max(depth.l1, warmth.pending_blocks) * size, usable)
    in_l2 = max(0, min((depth.l1 + depth.l2) * size, usable) - l1)
    l2, fetch_l2_s = _fetch(in_l2, facts, costs.l2_bytes_per_s, rate)
    # A block can be fetched only if all before it are there.
    l3_end = max(depth.total, warmth.shared_l3_blocks) * size if l2 == in_l2 else 0
    in_l3 = max(0, min(l3_end, usable) - l1 - l2)
    l3, fetch_l3_s = _fetch(in_l3, facts, transfer_rate(candidate, costs), rate)
    uncached = prompt_tokens - l1 - l2 - l3
    compute_s, stale_s = uncached / rate, staleness_s(candidate, costs)
    queue_s = queue_tokens(candidate, rate) / rate
    work_s = compute_s + fetch_l2_s + fetch_l3_s
    score_s = queue_s + work_s * (1.0 + costs.work_weight) + stale_s
    return PrefillEstimate(
        candidate, l1, l2, l3, uncached, queue_s, compute_s, fetch_l2_s, fetch_l3_s, stale_s, score_s
    )


def queue_tokens(candidate: Candidate, rate: float) -> float:
    """Tokens ahead: what was reported, less what the running step has done of it, and what was reserved since.

    An instance that is stuck does nothing of it, so at most half counts as done.
    """
    reported = max(0, candidate.load.waiting_prefill_tokens)
    return max(reported / 2, reported - candidate.unchanged_s * rate) + candidate.claims.prefill_tokens


def place_prefill(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    facts: ModelFacts,
    warmth: Mapping[Holder, Warmth],
    costs: Costs,
    rng: random.Random,
) -> PrefillEstimate:
    """The target with the least predicted seconds; there is at least one candidate."""
    costs = learn_from_peers(candidates, costs)
    estimates = [
        estimate_prefill(candidate, prompt_tokens, facts, warmth.get(candidate.key, Warmth()), costs)
        for candidate in candidates
    ]
    return pick(estimates, costs.tie_fraction, rng)


def _fetch(tokens: int, facts: ModelFacts, bytes_per_s: float, rate: float) -> tuple[int, float]:
    """(tokens fetched, seconds): all of them or, where computing is quicker or the size is not known, none."""
    if tokens == 0 or facts.kv_bytes_per_token == 0:
        return 0, 0.0
    seconds = FETCH_LATENCY_S + tokens * facts.kv_bytes_per_token / bytes_per_s
    return (tokens, seconds) if seconds < tokens / rate else (0, 0.0)
