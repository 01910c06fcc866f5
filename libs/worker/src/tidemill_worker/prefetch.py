"""Prefetch: while a request waits for a row or for blocks of L1, what kvstore has of its prompt comes to L2."""

import asyncio

import structlog

from tidemill_engine import messages
from tidemill_kvcache.hashing import hash_blocks
from tidemill_mesh import request_ids
from tidemill_worker.block_source import FAILURES, first_failure
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.l2_slots import L2Block
from tidemill_worker.l3_source import L3Source, find_in_l3
from tidemill_worker.l3_stores import KvStores
from tidemill_worker.landing import Landing
from tidemill_worker.residents import StoredBlock
from tidemill_worker.slabs import shape_of
from tidemill_worker.source_plan import plan_load
from tidemill_worker.worker import Worker

log = structlog.get_logger()

IN_FLIGHT = 2
MAX_WAITING = 16


class Prefetcher:
    """The prefetches of one domain's epoch."""

    def __init__(self, worker: Worker, tiers: DomainTiers, stores: KvStores) -> None:
        self._worker = worker
        self._tiers = tiers
        self._stores = stores
        self._shape = shape_of(tiers.domain.ready[0], worker.settings.block_size)
        self._turns = asyncio.Semaphore(IN_FLIGHT)
        self._tasks: dict[messages.RequestKey, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def submitted(self, submit: messages.Submit, sample: messages.LoadSample | None, tokens_per_s: float) -> None:
        """A request is on its way to the engine; begins a prefetch if it cannot start at once."""
        settings = self._worker.settings
        if sample is None or submit.stage == "decode" or settings.l3_policy == "off" or not self._tiers.l2.enabled:
            return
        rows_taken = sample.running_requests + sample.waiting_requests >= settings.max_num_seqs
        blocks = len(submit.token_ids) // settings.block_size + 1
        if len(self._tasks) >= MAX_WAITING or not (rows_taken or sample.available_blocks < blocks):
            return
        work = self._run(submit, tokens_per_s)
        task = asyncio.create_task(work, name=f"prefetch for {submit.key.request_id}")
        self._tasks[submit.key] = task
        task.add_done_callback(lambda done: self._ended(submit.key, done))

    async def settle(self, key: messages.RequestKey) -> None:
        """Waits for the request's prefetch, if there is one under way."""
        task = self._tasks.get(key)
        if task is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """Ends all prefetches."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: messages.RequestKey, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("prefetch failed unexpectedly", request_id=key.request_id, exc_info=error)

    async def _run(self, submit: messages.Submit, tokens_per_s: float) -> None:
        async with self._turns:
            if submit.key not in self._worker.table:
                return
            size = self._worker.settings.block_size
            hashes = hash_blocks(submit.hash_salt, submit.token_ids[: len(submit.token_ids) - 1], size)
            skipped = self._tiers.depth(hashes)
            try:
                with request_ids.logged_as(submit.key.request_id):
                    async with asyncio.timeout(self._worker.settings.l3_timeout_s):
                        await self._fetch(submit, hashes, skipped, tokens_per_s)
            except FAILURES as error:
                log.info("prefetch failed", request_id=submit.key.request_id, error=str(first_failure(error)))

    async def _fetch(self, submit: messages.Submit, hashes: list[bytes], skipped: int, tokens_per_s: float) -> None:
        deadline_s = self._worker.settings.l3_timeout_s
        wanted = messages.OnboardWanted(submit.key, 0, b"", hashes[skipped:], [], [], deadline_s)
        landing = Landing(wanted, self._shape)
        live = self._worker.table.get(submit.key)
        named = live.stores if live is not None else ()
        sources = await find_in_l3(self._worker, self._tiers.domain, self._stores, landing, deadline_s, named)
        plan = plan_load(
            [source.offer for source in sources],
            landing.num_blocks,
            block_bytes=self._shape.block_bytes,
            block_compute_s=self._worker.settings.block_size / max(tokens_per_s, 1e-9),
            need_snapshot=self._shape.has_sequence_state,
            always=self._worker.settings.onboard_choice == "always" or tokens_per_s <= 0,
        )
        offers = {index: source for source in sources for index in plan.by_source.get(source.offer.name, ())}
        reserved = self._reserve(submit, hashes, skipped, [offers[index] for index in range(plan.num_blocks)])
        if not reserved:
            return
        wanted.block_hashes = wanted.block_hashes[: len(reserved)]
        wanted.block_ids = [block.slot for block in reserved]
        wanted.snapshot_ids = [block.snapshot_slot for block in reserved]
        landing = Landing(wanted, self._shape, to_host=True)
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    indices = [i for i in plan.by_source.get(source.offer.name, ()) if i < len(reserved)]
                    if indices:
                        group.create_task(source.fetch(indices, landing, deadline_s))
        finally:
            self._settle(reserved, landing)

    def _reserve(
        self, submit: messages.Submit, hashes: list[bytes], skipped: int, sources: list[L3Source]
    ) -> list[L2Block]:
        """Slots for leading blocks, as far as there is room."""
        reserved: list[L2Block] = []
        for offset, source in enumerate(sources):
            index = skipped + offset
            parent = hashes[index - 1] if index else b""
            has_snapshot = source.offer.has_snapshot[offset]
            stored = StoredBlock(parent, hashes[index], has_snapshot, submit.tenant, index + 1)
            slots = self._tiers.l2.slots
            block = slots.reserve(stored, with_snapshot=has_snapshot) if slots.lacks(stored) else None
            if block is None:
                break
            reserved.append(block)
        return reserved

    def _settle(self, reserved: list[L2Block], landing: Landing) -> None:
        slots, good = self._tiers.l2.slots, landing.leading
        for index, block in enumerate(reserved[:good]):
            if not landing.has_snapshot(index):
                slots.without_snapshot(block)
            slots.filled(block)
        for block in reserved[good:]:
            slots.failed(block)
        self._worker.counts.l2_blocks("prefetched", good)
        self._tiers.l2.publish()
