"""Onboarding: a request's missing blocks are fetched from L2, peers and kvstore before its prompt is computed."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tidemill.mesh.v1 import common_pb2
from tidemill_engine import messages
from tidemill_worker.block_source import FAILURES, BlockSource, first_failure
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.l2_source import DEFAULT_BYTES_PER_S, L2Source
from tidemill_worker.l3_source import find_in_l3
from tidemill_worker.l3_stores import KvStores
from tidemill_worker.landing import Landing
from tidemill_worker.peer_source import PeerSource
from tidemill_worker.slabs import shape_of
from tidemill_worker.source_plan import LoadPlan, plan_load
from tidemill_worker.worker import Worker

log = structlog.get_logger()

ANSWER_SHARE = 0.9
"""Of the engine's deadline: later, what has arrived would not be used."""
MIN_PATIENCE_S = 0.05
"""A planned load is given so long at least."""
MAX_LOOKUP_S = 0.5
"""Longest time to ask stores what they have, where loading is a matter of speed."""
MAX_PLANS = 3
"""Plans of one onboarding: a source that fails is left out of the next."""


class Onboarding:
    """Answers one OnboardWanted."""

    def __init__(
        self,
        worker: Worker,
        tiers: DomainTiers,
        stores: KvStores,
        wanted: messages.OnboardWanted,
        *,
        peers: Sequence[common_pb2.BlockSource],
        named_stores: Sequence[str] = (),
        prefetched: Callable[[], Awaitable[None]] | None = None,
        prefill_tokens_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._tiers = tiers
        self._stores = stores
        self._peers = peers
        self._named_stores = named_stores
        self._prefetched = prefetched
        self._clock = clock
        self._landing = Landing(wanted, shape_of(tiers.domain.ready[0], worker.settings.block_size))
        self._ends_at = clock() + wanted.deadline_s * ANSWER_SHARE
        self._always = worker.settings.onboard_choice == "always" or prefill_tokens_per_s <= 0
        self._block_compute_s = worker.settings.block_size / max(prefill_tokens_per_s, 1e-9)

    async def run(self) -> messages.OnboardReady:
        """Loads what it can; a failure of any kind is only a lost hit."""
        started = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._ends_at - started)):
                await self._load()
        except TimeoutError:
            self._late()
        answer = self._landing.answer()
        counts = self._worker.counts
        arrived = self._landing.arrived(answer.num_blocks)
        counts.l2_blocks("onboarded", arrived["l2"])
        counts.peer_blocks("onboarded", arrived["peer"])
        counts.l3_blocks("onboarded", arrived["l3"])
        counts.l3_blocks("missed", self._landing.num_blocks - answer.num_blocks)
        if answer.num_blocks:
            counts.onboard_took(self._clock() - started)
        return answer

    async def _load(self) -> None:
        if self._prefetched is not None:
            # What is under way is not fetched twice.
            await self._prefetched()
        local = self._local()
        # L2 needs no answer of anybody: it is copied while the others are asked.
        async with asyncio.TaskGroup() as group:
            search = group.create_task(self._find_elsewhere(local))
            group.create_task(self._run_plans(local))
        await self._run_plans([*local, *search.result()])

    async def _run_plans(self, sources: Sequence[BlockSource]) -> None:
        """Loads what the sources have beyond what has arrived; a source that fails is left out of the next plan."""
        for _ in range(MAX_PLANS):
            plan = self._plan(sources)
            if not plan.num_blocks:
                return
            patience_s = self._patience_s(plan)
            try:
                async with asyncio.timeout(patience_s):
                    failed = await self._execute(plan, sources, patience_s)
            except TimeoutError:
                self._late()
                self._remember_late(plan, patience_s)
                return
            if not failed:
                return
            sources = [source for source in sources if source.offer.name not in failed]

    def _local(self) -> list[BlockSource]:
        """The domain's own L2."""
        l2, counts = self._tiers.l2, self._worker.counts
        if not l2.enabled:
            return []
        source = L2Source(l2, self._landing, self._worker.rates.bytes_per_s("l2", DEFAULT_BYTES_PER_S))
        counts.l2_blocks("asked", self._landing.num_blocks)
        counts.l2_blocks("found", sum(source.offer.has))
        return [source]

    async def _find_elsewhere(self, local: Sequence[BlockSource]) -> list[BlockSource]:
        """Other instances and stores that have wanted blocks; nobody is asked when L2 has all."""
        worker, tiers, landing = self._worker, self._tiers, self._landing
        if local and all(local[0].offer.has):
            return []
        own = worker.domain_ref(tiers.domain)
        sources: list[BlockSource] = [
            PeerSource(worker, tiers.domain, source, landing)
            for source in self._peers
            if worker.settings.peer_fetch and source.holder.domain.instance != own.instance
        ]
        if worker.settings.l3_policy != "off":
            lookup_s, named = self._lookup_s(bool(sources)), self._named_stores
            sources += await find_in_l3(worker, tiers.domain, self._stores, landing, lookup_s, named)
        return sources

    def _lookup_s(self, has_others: bool) -> float:
        """Longest time to ask the stores: a part of what is left, less where computing would be done by then."""
        left_s = max(0.01, self._ends_at - self._clock())
        if self._always:
            return left_s / 2 if has_others else left_s
        predicted_s = self._landing.num_blocks * self._block_compute_s / 2
        return min(left_s, MAX_LOOKUP_S, max(MIN_PATIENCE_S, predicted_s))

    def _plan(self, sources: Sequence[BlockSource]) -> LoadPlan:
        landing = self._landing
        return plan_load(
            [source.offer for source in sources],
            landing.num_blocks,
            first_block=landing.leading,
            block_bytes=landing.shape.block_bytes,
            block_compute_s=self._block_compute_s,
            need_snapshot=landing.shape.has_sequence_state,
            always=self._always,
        )

    def _patience_s(self, plan: LoadPlan) -> float:
        """How long the load may take: once computing would have been done, waiting was a mistake."""
        left_s = max(0.01, self._ends_at - self._clock())
        return left_s if self._always else min(left_s, max(MIN_PATIENCE_S, plan.compute_s))

    async def _execute(self, plan: LoadPlan, sources: Sequence[BlockSource], deadline_s: float) -> set[str]:
        """Fetches from all sources at once; names those that failed or gave less than they had said."""
        by_name = {source.offer.name: source for source in sources}
        names = list(plan.by_source)
        answers = await asyncio.gather(
            *(by_name[name].fetch(plan.by_source[name], self._landing, deadline_s) for name in names),
            return_exceptions=True,
        )
        failed = set()
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, FAILURES):
                log.warning("a source of blocks failed", source=name, error=str(first_failure(answer)))
                self._worker.counts.source_failed(by_name[name].offer.name.partition(" ")[0])
                failed.add(name)
            elif isinstance(answer, BaseException):
                raise answer
            elif not self._landing.has_landed(plan.by_source[name]):
                failed.add(name)
        return failed

    def _remember_late(self, plan: LoadPlan, seconds: float) -> None:
        for name, indices in plan.by_source.items():
            if not self._landing.has_landed(indices):
                self._worker.rates.late(name, len(indices) * self._landing.shape.block_bytes, seconds)

    def _late(self) -> None:
        self._worker.counts.l3_error("deadline")
        wanted = self._landing.wanted
        log.info("onboarding took too long", request_id=wanted.key.request_id, blocks=len(wanted.block_hashes))
