"""Answers placements: looks up who holds the prompt, asks placement, takes reservations. Synchronous."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from tidemill.mesh.v1.common_pb2 import Target, TierTokens
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
)
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.hashing import HASH_BYTES, pack
from tidemill_kvcache.index import L2, BlockIndex, Found, TierDepth
from tidemill_router import refusals
from tidemill_router.candidate import Candidate, Costs, ModelFacts
from tidemill_router.decode_placement import (
    DecodeEstimate,
    DecodeNeed,
    estimate_all,
    place_decode,
    place_whole,
    with_room,
    within_limits,
)
from tidemill_router.loadable import readable, shared_blocks, stores_in, stores_with
from tidemill_router.local_prefill import LocalPrefill
from tidemill_router.pairs import takers, with_a_taker
from tidemill_router.prefill_placement import PrefillEstimate, Warmth, place_prefill
from tidemill_router.reservations import DECODE, PREFILL, WHOLE, Owner, Reservation, Reservations
from tidemill_router.resumable import Boundaries
from tidemill_router.sources import Sources
from tidemill_router.view import MeshView


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what the index has of it."""

    hashes: bytes
    found: Found
    depths: dict[Holder, TierDepth]
    """Leading blocks of each instance."""
    boundaries: Boundaries | None
    """Where the model has sequence state."""
    _resumable: dict[Holder, TierDepth] = field(default_factory=dict)

    def resumable(self, candidates: Iterable[Candidate]) -> dict[Holder, TierDepth]:
        """Of these instances at least, leading blocks that a request can start behind."""
        if self.boundaries is None:
            return self.depths
        known = self._resumable
        for c in candidates:
            if c.key in self.depths and c.key not in known:
                known[c.key] = self.boundaries.own(c.key) if c.tells_snapshots else self.depths[c.key]
        return known


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
    local_prefill: LocalPrefill = field(default_factory=lambda: LocalPrefill(0.0, 1, time.monotonic))

    def place_prefill(self, request: PlacePrefillRequest) -> PlacePrefillResponse:
        """Where the request starts; MeshError says why nowhere."""
        hashes = self._checked(request, request.prompt_tokens, "prompt_tokens")
        revision, excluded = request.model_revision, request.excluded_instances
        facts = self._facts(revision, request.prompt_tokens, hashes)
        decodes = self.view.candidates(ROLE_DECODE, revision, excluded)
        if not decodes:
            raise refusals.unavailable("decode", revision, len(excluded))
        refusals.check_fits(request.prompt_tokens, facts.block_size, decodes)
        prompt = self._look_up(hashes, facts, request.prompt_tokens)
        depths, resumable = prompt.depths, prompt.resumable(decodes)
        need = DecodeNeed(request.prompt_tokens, request.max_tokens)
        direct = place_whole(decodes, need, facts, resumable, self.local_prefill.costs(revision, self.costs), self.rng)
        if direct is not None:
            others = [*decodes, *self.view.candidates(ROLE_PREFILL, revision, excluded)]
            sources = self._sources(prompt, others)
            return self._whole(request, prompt, need, facts, [direct.candidate], sources, degraded=False)
        prefills = with_a_taker(self.view.candidates(ROLE_PREFILL, revision, excluded), decodes)
        sources = self._sources(prompt, [*prefills, *decodes])
        if not prefills:
            estimates = estimate_all(decodes, need, facts, depths, self.costs)
            roomy = [e.candidate for e in within_limits(estimates, self.costs)]
            return self._whole(request, prompt, need, facts, roomy, sources, degraded=True)
        warmth = self._warmth(prefills, prompt, sources)
        chosen = place_prefill(prefills, request.prompt_tokens, facts, warmth, self.costs, self.rng)
        refusals.check_queue(chosen.queue_s, self.max_queue_s)
        made = self._reserve_prefill(PREFILL, request, hashes, chosen)
        willing = takers(decodes, chosen.candidate.domain)
        likely = place_decode(willing, need, facts, depths, self.costs, self.rng)
        self.reservations.claim_decode(made, likely.candidate.domain, need.blocks(facts, self.costs))
        response = self._prefill_response(made, chosen, whole=False)
        response.sources.extend(sources.better_than(chosen.candidate))
        response.stores.extend(self._stores_of(prompt, chosen.candidate))
        return response

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
        # The state comes with the hand-over: every block that is there need not be sent.
        depths = self._look_up(hashes, facts, request.context_tokens).depths
        willing = takers(decodes, request.prefill.domain)
        if willing or request.needs_room:
            # Else the KV is there and a transfer will tell: it is worth one more try.
            decodes = willing
        if request.needs_room:
            decodes = with_room(decodes, need, facts, depths, self.costs)
            if not decodes:
                raise refusals.no_room(revision)
        chosen = place_decode(decodes, need, facts, depths, self.costs, self.rng)
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
        prompt: Prompt,
        need: DecodeNeed,
        facts: ModelFacts,
        decodes: Sequence[Candidate],
        sources: Sources,
        *,
        degraded: bool,
    ) -> PlacePrefillResponse:
        """A decode instance does both stages: the prompt is short there, or no prefill instance is left."""
        warmth = self._warmth(decodes, prompt, sources)
        chosen = place_prefill(decodes, request.prompt_tokens, facts, warmth, self.costs, self.rng)
        made = self._reserve_prefill(WHOLE, request, prompt.hashes, chosen, blocks=need.blocks(facts, self.costs))
        response = self._prefill_response(made, chosen, whole=True)
        response.sources.extend(sources.better_than(chosen.candidate))
        response.stores.extend(self._stores_of(prompt, chosen.candidate))
        if degraded:
            response.terms["degraded"] = 1.0
        return response

    def _reserve_prefill(
        self,
        kind: str,
        request: PlacePrefillRequest,
        hashes: bytes,
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
                l1=chosen.cached_l1_tokens,
                l2=chosen.cached_l2_tokens + chosen.cached_peer_tokens,
                l3=chosen.cached_l3_tokens,
            ),
            predicted_ttft_s=chosen.total_s,
            terms=chosen.terms(),
        )

    def _stores_of(self, prompt: Prompt, target: Candidate) -> list[str]:
        """kvstores that have blocks of the prompt that the target can read. It asks for what it lacks, which it knows
        better, as it does what loading takes; and it looks in few stores on its own."""
        stores = readable(stores_in(self.index, self.view.leaving_stores), target.kv_format)
        return stores_with(self.index, prompt.found, stores)

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

    def _checked(self, request: PlacePrefillRequest | PlaceDecodeRequest, tokens: int, field: str) -> bytes:
        """The request's hashes, packed, after what a caller can get wrong."""
        if tokens < 1:
            raise refusals.invalid(field, "must be at least 1", "1 token")
        if not request.model_revision:
            raise refusals.invalid("model_revision", "must name a revision", "")
        if not self.view.knows(request.model_revision):
            raise refusals.model_not_found(request.model_revision)
        try:
            return pack(request.block_hashes)
        except ValueError as error:
            raise refusals.invalid("block_hashes", str(error), "16 bytes each") from error

    def _facts(self, revision: str, tokens: int, hashes: bytes) -> ModelFacts:
        """The model's card, or while that is on its way what the request itself tells of the block size."""
        at_most = max(1, tokens // max(1, len(hashes) // HASH_BYTES))
        return self.facts_of(revision) or ModelFacts(block_size=1 << (at_most.bit_length() - 1), kv_bytes_per_token=0)

    def _look_up(self, hashes: bytes, facts: ModelFacts, tokens: int) -> Prompt:
        found, interval = self.index.find(hashes), facts.snapshot_interval_blocks
        holders = self.index.depths(found).items()
        depths = {h: depth for h, depth in holders if isinstance(h, tuple) and len(h) == 2}
        most = (tokens - 1) // facts.block_size
        boundaries = Boundaries(self.index, self.index.along(found), most, interval) if interval else None
        return Prompt(hashes, found, depths, boundaries)

    def _sources(self, prompt: Prompt, instances: Sequence[Candidate]) -> Sources:
        boundaries, along = prompt.boundaries, cache(lambda: self.index.along(prompt.found))

        def in_l2(instance: Candidate) -> int:
            if boundaries is not None and instance.tells_snapshots:
                return boundaries.in_l2(instance.key)
            return along().held_from(0, self.index.bits([instance.key], L2))

        return Sources(instances, prompt.resumable(instances), in_l2)

    def _warmth(self, candidates: Sequence[Candidate], prompt: Prompt, sources: Sources) -> dict[Holder, Warmth]:
        if prompt.boundaries is not None:
            return self._warmth_of_state(candidates, prompt, prompt.boundaries, sources)
        kv_formats = [c.kv_format for c in candidates]
        shared = shared_blocks(self.index, prompt.found, kv_formats, self.view.leaving_stores)
        pending, depths = self.reservations.pending, prompt.depths
        return {
            c.key: Warmth(
                depths.get(c.key, TierDepth()),
                pending.depth(c.key, prompt.hashes),
                shared[c.kv_format],
                sources.beside(c),
            )
            for c in candidates
        }

    def _warmth_of_state(
        self, candidates: Sequence[Candidate], prompt: Prompt, boundaries: Boundaries, sources: Sources
    ) -> dict[Holder, Warmth]:
        """The same of a model with sequence state: all of it down to a snapshot."""
        all_stores, silent = stores_in(self.index, self.view.leaving_stores), self.view.silent_stores
        kv_formats = {c.kv_format for c in candidates}
        stores = {name: boundaries.of_stores(readable(all_stores, name), silent) for name in kv_formats}
        pending, own = self.reservations.pending, prompt.resumable(candidates)
        warmth = {}
        for c in candidates:
            depth = own.get(c.key, TierDepth())
            warmth[c.key] = Warmth(
                depth,
                boundaries.computed(pending.depth(c.key, prompt.hashes)),
                boundaries.shared(c.key, depth, stores[c.kv_format]),
                sources.beside(c),
            )
        return warmth


def _owner(request: PlacePrefillRequest | PlaceDecodeRequest) -> Owner:
    return request.gateway.instance, request.gateway.incarnation


def _target(candidate: Candidate) -> Target:
    return Target(domain=candidate.domain, endpoint=candidate.endpoint)
