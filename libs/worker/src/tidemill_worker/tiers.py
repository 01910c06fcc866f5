"""The tiers below L1 as a worker sees them: blocks go down as policies say and come back before they are computed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial

import structlog

from tidemill.mesh.v1 import common_pb2, transfer_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.hashing import hash_blocks
from tidemill_kvcache.runs import CacheEvent
from tidemill_mesh import request_ids
from tidemill_mesh.errors import MeshError
from tidemill_worker.domain import Domain
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.l3_stores import Instances, KvStores
from tidemill_worker.onboard import Onboarding
from tidemill_worker.peer_serve import serve_blocks
from tidemill_worker.prefetch import Prefetcher
from tidemill_worker.residents import HotPrefix, Tenants
from tidemill_worker.submits import DEFAULT_TENANT
from tidemill_worker.worker import Worker

log = structlog.get_logger()

MAX_SERVED = 4
"""Fetches of other instances that are served at a time."""


class Tiers:
    """A cache observer that copies blocks down, and the onboarder of all domains."""

    def __init__(
        self,
        worker: Worker,
        instances: Instances,
        tell: Callable[[Domain, list[CacheEvent]], None],
        load: Callable[[Domain], messages.LoadSample | None],
    ) -> None:
        self._worker = worker
        self._stores = KvStores(instances, worker.channels)
        self._tell = tell
        self._load = load
        self._tenants = Tenants()
        self._domains: dict[int, DomainTiers] = {}
        self._prefetchers: dict[int, Prefetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._onboards: dict[asyncio.Task[None], DomainTiers] = {}
        self._serving = 0

    async def serve(self, request: transfer_pb2.FetchBlocksRequest) -> AsyncIterator[transfer_pb2.FetchBlocksResponse]:
        """Another instance takes blocks; one too many is refused, since it can compute them as well."""
        if self._serving >= MAX_SERVED:
            raise MeshError(
                errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "blocks are sent to others already", retry_after_s=1.0
            )
        self._serving += 1
        responses = serve_blocks(self._worker, list(self._domains.values()), request)
        try:
            async for response in responses:
                yield response
        finally:
            self._serving -= 1
            await responses.aclose()  # type: ignore[attr-defined]

    def holds(self) -> dict[str, int]:
        """Onboards and copies under way."""
        held = {
            "onboards": len(self._onboards),
            "offloads": 0,
            "l2_saves": 0,
            "l2_pins": 0,
            "peer_sends": self._serving,
            "prefetches": sum(len(prefetcher) for prefetcher in self._prefetchers.values()),
        }
        for tiers in self._domains.values():
            for kind, count in tiers.num_holds.items():
                held[kind] += count
        return held

    def l2_use(self) -> dict[int, tuple[int, int]]:
        """Blocks in L2 and its slots, by domain."""
        return {index: (len(tiers.l2.slots), tiers.l2.slots.num_slots) for index, tiers in self._domains.items()}

    def hottest(self, count: int) -> list[HotPrefix]:
        """The prefixes that saved most, of all domains."""
        found = [prefix for tiers in self._domains.values() for prefix in tiers.residents.hottest(count)]
        return sorted(found, key=lambda prefix: prefix.weight, reverse=True)[:count]

    def submitted(self, domain: Domain, submit: messages.Submit) -> None:
        """A request is about to be scheduled."""
        block_size = self._worker.settings.block_size
        if len(submit.token_ids) > block_size:
            first = hash_blocks(submit.hash_salt, submit.token_ids[:block_size], block_size)[0]
            self._tenants.submitted(first, submit.tenant or DEFAULT_TENANT)
        prefetcher = self._prefetchers.get(domain.index)
        if prefetcher is not None:
            prefetcher.submitted(submit, self._load(domain), self._tokens_per_s(domain))

    def domain_up(self, domain: Domain) -> None:
        """Begins the epoch."""
        tiers = DomainTiers(self._worker, domain, self._stores, self._tenants, self._tell)
        self._domains[domain.index] = tiers
        self._prefetchers[domain.index] = Prefetcher(self._worker, tiers, self._stores)

    def domain_down(self, domain: Domain) -> None:
        """Ends the epoch, with the onboardings whose places were in it: the next has other blocks under these ids."""
        tiers = self._domains.pop(domain.index, None)
        if tiers is not None:
            for task in [task for task, owner in self._onboards.items() if owner is tiers]:
                task.cancel()
            prefetcher = self._prefetchers.pop(domain.index)
            self._start(_close(prefetcher, tiers), f"end tiers {domain.index}")

    def stored(self, domain: Domain, event: messages.BlocksStored) -> None:
        """Blocks became reusable in L1."""
        if tiers := self._domains.get(domain.index):
            tiers.stored(event)

    def removed(self, domain: Domain, event: messages.BlocksRemoved) -> None:
        """Blocks left L1."""
        if tiers := self._domains.get(domain.index):
            tiers.removed(event)

    def snapshots_dropped(self, domain: Domain, event: messages.SnapshotsDropped) -> None:
        """Blocks of L1 go on without their snapshots."""
        if tiers := self._domains.get(domain.index):
            tiers.residents.snapshots_dropped(event.block_hashes)

    def cleared(self, domain: Domain) -> None:
        """L1 and L2 forget, L3 keeps what it has."""
        if tiers := self._domains.get(domain.index):
            tiers.cleared()

    def step_done(self, domain: Domain) -> None:
        """All events of a step have been told."""
        if tiers := self._domains.get(domain.index):
            tiers.step_done()

    def hit(self, domain: Domain, report: messages.BlocksHit) -> None:
        """A request found blocks in L1."""
        if tiers := self._domains.get(domain.index):
            tiers.hit(report)

    def cooling(self, domain: Domain, report: messages.BlocksCooling) -> None:
        """Blocks will leave L1 soon."""
        if tiers := self._domains.get(domain.index):
            tiers.cooling(report)

    def wanted(self, domain: Domain, report: messages.OnboardWanted) -> None:
        """Answers with OnboardReady, in any case."""
        tiers = self._domains.get(domain.index)
        if tiers is None:
            domain.send(messages.OnboardReady(report.key, 0))
            return
        task = self._start(self._onboard(tiers, report), f"onboard {report.key.request_id}")
        self._onboards[task] = tiers

    def pinned(self, domain: Domain, report: messages.BlocksPinned) -> None:
        """Hands an answer on."""
        if tiers := self._domains.get(domain.index):
            tiers.pins.pinned(report)

    async def close(self) -> None:
        """Ends all tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for index, tiers in self._domains.items():
            await _close(self._prefetchers[index], tiers)

    async def _onboard(self, tiers: DomainTiers, wanted: messages.OnboardWanted) -> None:
        answer = messages.OnboardReady(wanted.key, 0)
        live = self._worker.table.get(wanted.key)
        peers: list[common_pb2.BlockSource] = list(live.block_sources) if live is not None else []
        named_stores = live.stores if live is not None else ()
        prefetcher = self._prefetchers.get(tiers.domain.index)
        try:
            onboarding = Onboarding(
                self._worker,
                tiers,
                self._stores,
                wanted,
                peers=peers,
                named_stores=named_stores,
                prefetched=partial(prefetcher.settle, wanted.key) if prefetcher is not None else None,
                prefill_tokens_per_s=self._tokens_per_s(tiers.domain),
            )
            with request_ids.logged_as(wanted.key.request_id):
                answer = await onboarding.run()
        finally:
            if not tiers.ended:
                tiers.domain.send(answer)

    def _tokens_per_s(self, domain: Domain) -> float:
        """Measured speed of prefill; 0 while it is not known."""
        sample = self._load(domain)
        return sample.prefill_tokens_per_s if sample is not None else 0.0

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._onboards.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work on tiers failed unexpectedly", task=task.get_name(), exc_info=error)


async def _close(prefetcher: Prefetcher, tiers: DomainTiers) -> None:
    await prefetcher.close()
    await tiers.close()
