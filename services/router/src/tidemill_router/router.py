"""Answers placements: looks up who holds the prompt, asks placement, takes reservations. Synchronous."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.mesh.v1.common_pb2 import Target, TierTokens
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
)
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.hashing import split_hashes
from tidemill_kvcache.index import BlockIndex, TierDepth
from tidemill_router import refusals
from tidemill_router.candidate import Candidate, Costs, ModelFacts
from tidemill_router.decode_placement import (
    DecodeEstimate,
    DecodeNeed,
    estimate_all,
    place_decode,
    place_whole,
    within_limits,
)
from tidemill_router.prefill_placement import PrefillEstimate, Warmth, place_prefill
from tidemill_router.reservations import DECODE, PREFILL, WHOLE, Owner, Reservation, Reservations
from tidemill_router.view import MeshView


@dataclass
class Router:
    """The placements of one router process."""

    view: MeshView
    index: BlockIndex
    reservations: Reservations
    facts_of: Callable[[str], ModelFacts | None]
    """What is known of a model revision."""
    costs: Costs
    max_queue_s: float
    rng: random.Random

    def place_prefill(self, request: PlacePrefillRequest) -> PlacePrefillResponse:
        """Where the request starts; MeshError says why nowhere."""
        hashes = self._checked(request, request.prompt_tokens, "prompt_tokens")
        revision, excluded = request.model_revision, request.excluded_instances
        facts = self._facts(revision, request.prompt_tokens, hashes)
        decodes = self.view.candidates(ROLE_DECODE, revision, excluded)
        if not decodes:
            raise refusals.unavailable("decode", revision, len(excluded))
        refusals.check_fits(request.prompt_tokens, facts.block_size, decodes)
        depths = self._depths(hashes)
        need = DecodeNeed(request.prompt_tokens, request.max_tokens)
        direct = place_whole(decodes, need, facts, depths, self.costs, self.rng)
        if direct is not None:
            return self._whole(request, hashes, need, facts, depths, [direct.candidate], degraded=False)
        prefills = self.view.candidates(ROLE_PREFILL, revision, excluded)
        if not prefills:
            estimates = estimate_all(decodes, need, facts, depths, self.costs)
            roomy = [e.candidate for e in within_limits(estimates, self.costs)]
            return self._whole(request, hashes, need, facts, depths, roomy, degraded=True)
        warmth = self._warmth(prefills, hashes, depths)
        chosen = place_prefill(prefills, request.prompt_tokens, facts, warmth, self.costs, self.rng)
        refusals.check_queue(chosen.queue_s, self.max_queue_s)
        made = self._reserve_prefill(PREFILL, request, hashes, chosen)
        likely = place_decode(decodes, need, facts, depths, self.costs, self.rng)
        self.reservations.claim_decode(made, likely.candidate.domain, need.blocks(facts, self.costs))
        return self._prefill_response(made, chosen, whole=False)

    def place_decode(self, request: PlaceDecodeRequest) -> PlaceDecodeResponse:
        """Where the request goes on; MeshError says why nowhere."""
        hashes = self._checked(request, request.context_tokens, "context_tokens")
        revision, excluded = request.model_revision, request.excluded_instances
        facts = self._facts(revision, request.context_tokens, hashes)
        decodes = self.view.candidates(ROLE_DECODE, revision, excluded)
        if not decodes:
            raise refusals.unavailable("decode", revision, len(excluded))
        refusals.check_fits(request.context_tokens, facts.block_size, decodes)
        # The claim taken with the prefill must not count against the same request.
        request_key = (request.request_id, request.choice)
        self.reservations.settle_decode(request_key)
        decodes = self.view.candidates(ROLE_DECODE, revision, excluded)
        need = DecodeNeed(request.context_tokens, request.max_tokens)
        chosen = place_decode(decodes, need, facts, self._depths(hashes), self.costs, self.rng)
        self.index.touch(chosen.candidate.key, hashes)
        made = self.reservations.reserve(
            DECODE,
            _owner(request),
            chosen.candidate.domain,
            blocks=need.blocks(facts, self.costs),
            request=request_key,
            predicted_s=chosen.tpot_s,
        )
        return self._decode_response(made, chosen)

    def _whole(
        self,
        request: PlacePrefillRequest,
        hashes: Sequence[bytes],
        need: DecodeNeed,
        facts: ModelFacts,
        depths: dict[Holder, TierDepth],
        decodes: Sequence[Candidate],
        *,
        degraded: bool,
    ) -> PlacePrefillResponse:
        """A decode instance does both stages: the prompt is short there, or no prefill instance is left."""
        warmth = self._warmth(decodes, hashes, depths)
        chosen = place_prefill(decodes, request.prompt_tokens, facts, warmth, self.costs, self.rng)
        made = self._reserve_prefill(WHOLE, request, hashes, chosen, blocks=need.blocks(facts, self.costs))
        response = self._prefill_response(made, chosen, whole=True)
        if degraded:
            response.terms["degraded"] = 1.0
        return response

    def _reserve_prefill(
        self,
        kind: str,
        request: PlacePrefillRequest,
        hashes: Sequence[bytes],
        chosen: PrefillEstimate,
        blocks: int = 0,
    ) -> Reservation:
        self.index.touch(chosen.candidate.key, hashes)
        return self.reservations.reserve(
            kind,
            _owner(request),
            chosen.candidate.domain,
            prefill_tokens=chosen.uncached_tokens,
            blocks=blocks,
            hashes=hashes,
            request=(request.request_id, request.choice),
            predicted_s=chosen.total_s,
        )

    def _prefill_response(self, made: Reservation, chosen: PrefillEstimate, *, whole: bool) -> PlacePrefillResponse:
        return PlacePrefillResponse(
            target=_target(chosen.candidate),
            whole=whole,
            reservation_id=made.id,
            reservation_deadline_s=self.reservations.stand_s,
            expected_cached=TierTokens(
                l1=chosen.cached_l1_tokens, l2=chosen.cached_l2_tokens, l3=chosen.cached_l3_tokens
            ),
            predicted_ttft_s=chosen.total_s,
            terms=chosen.terms(),
        )

    def _decode_response(self, made: Reservation, chosen: DecodeEstimate) -> PlaceDecodeResponse:
        response = PlaceDecodeResponse(
            target=_target(chosen.candidate),
            reservation_id=made.id,
            reservation_deadline_s=self.reservations.stand_s,
            held_blocks=chosen.held_blocks,
            predicted_tpot_s=chosen.tpot_s,
            terms=chosen.terms(),
        )
        if chosen.use_after > self.costs.decode_high_water:
            response.terms["over_high_water"] = 1.0
        return response

    def _checked(self, request: PlacePrefillRequest | PlaceDecodeRequest, tokens: int, field: str) -> list[bytes]:
        """The request's hashes, after what a caller can get wrong."""
        if tokens < 1:
            raise refusals.invalid(field, "must be at least 1", "1 token")
        if not request.model_revision:
            raise refusals.invalid("model_revision", "must name a revision", "")
        if not self.view.knows(request.model_revision):
            raise refusals.model_not_found(request.model_revision)
        try:
            return split_hashes(request.block_hashes)
        except ValueError as error:
            raise refusals.invalid("block_hashes", str(error), "16 bytes each") from error

    def _facts(self, revision: str, tokens: int, hashes: Sequence[bytes]) -> ModelFacts:
        """The model's card, or while that is on its way what the request itself tells of the block size."""
        at_most = max(1, tokens // max(1, len(hashes)))
        return self.facts_of(revision) or ModelFacts(block_size=1 << (at_most.bit_length() - 1), kv_bytes_per_token=0)

    def _depths(self, hashes: Sequence[bytes]) -> dict[Holder, TierDepth]:
        return {holder: depth for holder, depth in self.index.match(hashes).items() if isinstance(holder, tuple)}

    def _warmth(
        self, candidates: Sequence[Candidate], hashes: Sequence[bytes], depths: dict[Holder, TierDepth]
    ) -> dict[Holder, Warmth]:
        # Only kvstore holds blocks in L3 alone.
        shared = max((d.l3 for d in depths.values() if d.l1 + d.l2 == 0), default=0)
        pending = self.reservations.pending
        return {c.key: Warmth(depths.get(c.key, TierDepth()), pending.depth(c.key, hashes), shared) for c in candidates}


def _owner(request: PlacePrefillRequest | PlaceDecodeRequest) -> Owner:
    return request.gateway.instance, request.gateway.incarnation


def _target(candidate: Candidate) -> Target:
    return Target(domain=candidate.domain, endpoint=candidate.endpoint)
