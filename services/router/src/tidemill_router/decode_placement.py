"""Where a request decodes: predicted seconds to its end, within what the instances' KV memory allows."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import (
    Candidate,
    Costs,
    ModelFacts,
    learn_decode,
    staleness_s,
    transfer_rate,
)
from tidemill_router.decode_steps import Batch, batch_with, predict_steps
from tidemill_router.pick import pick_least_crowded

COMFORTABLE_USE = 0.5
"""Share of blocks in use up to which an instance will hardly preempt."""


@dataclass(frozen=True, slots=True)
class DecodeNeed:
    """What the request will take."""

    context_tokens: int
    max_tokens: int

    def output_tokens(self, costs: Costs) -> int:
        """Expected output."""
        return max(1, min(self.max_tokens, costs.expected_output_tokens))

    def blocks(self, facts: ModelFacts, costs: Costs) -> int:
        """Blocks of the context and the expected output."""
        return -(-(self.context_tokens + self.output_tokens(costs)) // facts.block_size)


@dataclass(frozen=True, slots=True)
class DecodeEstimate:
    """Prediction for one target."""

    candidate: Candidate
    held_blocks: int
    tpot_s: float
    decode_s: float
    transfer_s: float
    headroom_s: float
    staleness_s: float
    use_after: float
    """Share of the target's blocks in use once the request has its expected output."""
    batch: Batch
    """With this request."""

    @property
    def has_seat(self) -> bool:
        """The batch has room for one more."""
        return self.batch.seats == 0 or self.batch.rows <= self.batch.seats

    @property
    def crowding(self) -> float:
        """What one of nearly equal targets is chosen by."""
        return self.batch.rows

    @property
    def score_s(self) -> float:
        """Predicted seconds to the end of the request."""
        return self.decode_s + self.transfer_s + self.headroom_s + self.staleness_s

    def terms(self) -> dict[str, float]:
        """Why, in seconds by name."""
        return {
            "tpot": self.tpot_s,
            "transfer": self.transfer_s,
            "headroom": self.headroom_s,
            "staleness": self.staleness_s,
            "total": self.score_s,
        }


def estimate_decode(
    candidate: Candidate,
    batch: Batch,
    tpot_s: float,
    need: DecodeNeed,
    facts: ModelFacts,
    depth: TierDepth,
    costs: Costs,
) -> DecodeEstimate:
    """Predicts one target."""
    decode_s = tpot_s * need.output_tokens(costs)
    lacking_tokens = max(0, need.context_tokens - depth.l1 * facts.block_size)
    use_after = blocks_use(candidate, need.blocks(facts, costs))
    return DecodeEstimate(
        candidate,
        held_blocks=depth.l1,
        tpot_s=tpot_s,
        decode_s=decode_s,
        transfer_s=lacking_tokens * facts.kv_bytes_per_token / transfer_rate(candidate, costs),
        headroom_s=decode_s * max(0.0, use_after - COMFORTABLE_USE),
        staleness_s=staleness_s(candidate, costs),
        use_after=use_after,
        batch=batch,
    )


def blocks_use(candidate: Candidate, more_blocks: int) -> float:
    """Share of the blocks in use with what is reserved and `more_blocks`; evictable blocks are not in use."""
    total = candidate.load.total_blocks or candidate.total_blocks
    if total == 0:
        return 0.0
    available = candidate.load.available_blocks if candidate.load.total_blocks else total
    return 1.0 - (available - candidate.claims.blocks - more_blocks) / total


def estimate_all(
    candidates: Sequence[Candidate],
    need: DecodeNeed,
    facts: ModelFacts,
    depths: Mapping[Holder, TierDepth],
    costs: Costs,
) -> list[DecodeEstimate]:
    """Predicts each target."""
    costs = learn_decode(candidates, costs)
    batches = [batch_with(candidate, need.context_tokens, facts.block_size) for candidate in candidates]
    steps = predict_steps(candidates, batches, costs)
    return [
        estimate_decode(candidate, batch, step_s, need, facts, depths.get(candidate.key, TierDepth()), costs)
        for candidate, batch, step_s in zip(candidates, batches, steps, strict=True)
    ]


def within_limits(estimates: Sequence[DecodeEstimate], costs: Costs) -> list[DecodeEstimate]:
    """Those below the high-water mark with a seat; else those below the mark; else all of them. An instance that has
    paused admission is past its own mark."""
    below = [e for e in estimates if e.use_after <= costs.decode_high_water and not e.candidate.load.admission_paused]
    return [e for e in below if e.has_seat] or below or list(estimates)


def with_room(
    candidates: Sequence[Candidate],
    need: DecodeNeed,
    facts: ModelFacts,
    depths: Mapping[Holder, TierDepth],
    costs: Costs,
) -> list[Candidate]:
    """Those that would take a running request at once: a seat, and below the high-water mark with it."""
    estimates = estimate_all(candidates, need, facts, depths, costs)
    below = [e for e in within_limits(estimates, costs) if e.use_after <= costs.decode_high_water and e.has_seat]
    return [e.candidate for e in below if not e.candidate.load.admission_paused]


def place_decode(
    candidates: Sequence[Candidate],
    need: DecodeNeed,
    facts: ModelFacts,
    depths: Mapping[Holder, TierDepth],
    costs: Costs,
    rng: random.Random,
) -> DecodeEstimate:
    """The target with the least predicted seconds; there is at least one candidate."""
    estimates = estimate_all(candidates, need, facts, depths, costs)
    return pick_least_crowded(within_limits(estimates, costs), costs.tie_fraction, rng)


def place_whole(
    candidates: Sequence[Candidate],
    need: DecodeNeed,
    facts: ModelFacts,
    depths: Mapping[Holder, TierDepth],
    costs: Costs,
    rng: random.Random,
) -> DecodeEstimate | None:
    """A decode instance that lacks so few tokens that it computes them itself, if one has room; None: none."""
    if not costs.direct_uncached_tokens:
        return None
    fit = [
        e
        for e in estimate_all(candidates, need, facts, depths, costs)
        if need.context_tokens - e.held_blocks * facts.block_size <= costs.direct_uncached_tokens
        and e.use_after <= costs.decode_high_water
        and e.has_seat
        and not e.candidate.load.admission_paused
        and e.candidate.load.slo_load <= 1.0
    ]
    return pick_least_crowded(fit, costs.tie_fraction, rng) if fit else None
