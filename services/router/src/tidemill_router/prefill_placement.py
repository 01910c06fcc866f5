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
    learn_prefill,
    prefill_rate,
    staleness_s,
)
from tidemill_router.fetch import Reach, best_fetch
from tidemill_router.pick import pick
from tidemill_router.turnover import pressures

COPY_WORK = 0.25
"""What a copy of blocks that lie in another instance's memory displaces, as a share of the work of computing them: it
takes as much room, but some of what leaves can be fetched as well."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """Leading blocks of the prompt that a target has, or will have."""

    depth: TierDepth = field(default_factory=TierDepth)
    pending_blocks: int = 0
    """Leading blocks that placements still under way will leave in L1."""
    shared_l3_blocks: int = 0
    """Leading blocks that kvstore has for everybody."""
    peer_blocks: int = 0
    """Leading blocks that some other instance has in its memory."""


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """Prediction for one target; `score_s` orders the targets, `total_s` is the predicted TTFT."""

    candidate: Candidate
    cached_l1_tokens: int
    cached_l2_tokens: int
    """Of its own L2."""
    cached_peer_tokens: int
    """In the memory of another instance."""
    cached_l3_tokens: int
    uncached_tokens: int
    queue_s: float
    compute_s: float
    fetch_l2_s: float
    fetch_peer_s: float
    fetch_l3_s: float
    staleness_s: float
    displaced_s: float
    """For what the blocks that it takes in displace, which may have to be computed again; no part of the TTFT."""

    @property
    def score_s(self) -> float:
        """What orders the targets."""
        return self.total_s + self.displaced_s

    @property
    def total_s(self) -> float:
        """Predicted seconds to the first token."""
        fetch_s = self.fetch_l2_s + self.fetch_peer_s + self.fetch_l3_s
        return self.queue_s + self.compute_s + fetch_s + self.staleness_s

    def terms(self) -> dict[str, float]:
        """Why, in seconds by name."""
        return {
            "queue": self.queue_s,
            "compute": self.compute_s,
            "fetch_l2": self.fetch_l2_s,
            "fetch_peer": self.fetch_peer_s,
            "fetch_l3": self.fetch_l3_s,
            "staleness": self.staleness_s,
            "displaced": self.displaced_s,
            "total": self.total_s,
        }


def estimate_prefill(
    candidate: Candidate, prompt_tokens: int, facts: ModelFacts, warmth: Warmth, costs: Costs, pressure: float = 1.0
) -> PrefillEstimate:
    """Predicts one target; blocks below L1 count as cached where fetching them beats computing them.

    `pressure` is how fast its cache turns over, relative to its peers.
    """
    rate = prefill_rate(candidate, costs)
    # The last token is always computed, for its logits.
    usable = max(0, prompt_tokens - 1)
    depth, size = warmth.depth, facts.block_size
    l1 = min(max(depth.l1, warmth.pending_blocks) * size, usable)
    l2 = max(l1, min((depth.l1 + depth.l2) * size, usable))
    peer = max(l2, min(warmth.peer_blocks * size, usable)) if costs.peer_fetch else l2
    l3 = max(l2, min(max(depth.total, warmth.shared_l3_blocks) * size, usable))
    fetch = best_fetch(candidate, Reach(l1, l2, peer, l3), facts, costs, rate)
    uncached = prompt_tokens - l1 - fetch.tokens
    compute_s = uncached / rate
    return PrefillEstimate(
        candidate,
        cached_l1_tokens=l1,
        cached_l2_tokens=fetch.l2_tokens,
        cached_peer_tokens=fetch.peer_tokens,
        cached_l3_tokens=fetch.l3_tokens,
        uncached_tokens=uncached,
        queue_s=queue_tokens(candidate, rate) / rate,
        compute_s=compute_s,
        fetch_l2_s=fetch.l2_s,
        fetch_peer_s=fetch.peer_s,
        fetch_l3_s=fetch.l3_s,
        staleness_s=staleness_s(candidate, costs),
        displaced_s=costs.work_weight * pressure * (compute_s + fetch.seconds + COPY_WORK * fetch.peer_tokens / rate),
    )


def queue_tokens(candidate: Candidate, rate: float) -> float:
    """Tokens ahead: what was reported, less what has been done of it, and what was reserved since.

    Done is what gateways say, or what the running step should have done; an instance that is stuck does nothing, so at
    most half counts by time alone.
    """
    reported = max(0, candidate.load.waiting_prefill_tokens)
    done = max(min(reported / 2, candidate.unchanged_s * rate), candidate.computed_tokens)
    return max(0.0, reported - done) + candidate.claims.prefill_tokens


def place_prefill(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    facts: ModelFacts,
    warmth: Mapping[Holder, Warmth],
    costs: Costs,
    rng: random.Random,
) -> PrefillEstimate:
    """The target with the least predicted seconds; there is at least one candidate."""
    costs = learn_prefill(candidates, costs)
    inflows = [c.recent_tokens / max(1, c.total_blocks * facts.block_size) for c in candidates]
    estimates = [
        estimate_prefill(candidate, prompt_tokens, facts, warmth.get(candidate.key, Warmth()), costs, pressure)
        for candidate, pressure in zip(candidates, pressures(inflows), strict=True)
    ]
    return pick(estimates, costs.tie_fraction, rng)
