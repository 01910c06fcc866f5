"""L3 as a worker sees it: blocks go to kvstore as they are computed and come back before they are computed again."""

import asyncio
from collections.abc import Coroutine

import structlog

from tidemill_engine import messages
from tidemill_worker.domain import Domain
from tidemill_worker.l3_offload import Offloader
from tidemill_worker.l3_onboard import Onboarding
from tidemill_worker.l3_stores import Instances, KvStores
from tidemill_worker.worker import Worker

log = structlog.get_logger()


class L3Tier:
    """A cache observer that offloads, and the onboarder of all domains."""

    def __init__(self, worker: Worker, instances: Instances) -> None:
        self._worker = worker
        self._stores = KvStores(instances, worker.channels)
        self._enabled = worker.settings.l3_policy != "off"
        self._offloaders: dict[int, Offloader] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def holds(self) -> dict[str, int]:
        """Onboards and offloads under way."""
        return {
            "onboards": sum(not task.get_name().startswith("end ") for task in self._tasks),
            "offloads": sum(offloader.num_holds for offloader in self._offloaders.values()),
        }

    def domain_up(self, domain: Domain) -> None:
        """Starts the epoch's offloads."""
        if self._enabled:
            self._offloaders[domain.index] = Offloader(self._worker, domain, self._stores)

    def domain_down(self, domain: Domain) -> None:
        """Ends the epoch's offloads."""
        offloader = self._offloaders.pop(domain.index, None)
        if offloader is not None:
            self._start(offloader.close(), f"end offloads {domain.index}")

    def stored(self, domain: Domain, event: messages.BlocksStored) -> None:
        """Queues new blocks to be offloaded."""
        offloader = self._offloaders.get(domain.index)
        if offloader is not None:
            offloader.stored(event)

    def removed(self, domain: Domain, event: messages.BlocksRemoved) -> None:
        """L1 forgets; L3 keeps what it has."""

    def cleared(self, domain: Domain) -> None:
        """L1 forgets; L3 keeps what it has."""

    def step_done(self, domain: Domain) -> None:
        """Offloads need no batches."""

    def wanted(self, domain: Domain, report: messages.OnboardWanted) -> None:
        """Answers with OnboardReady, in any case."""
        if not self._enabled:
            domain.send(messages.OnboardReady(report.key, 0))
            return
        self._start(self._onboard(domain, report), f"onboard {report.key.request_id}")

    def pinned(self, domain: Domain, report: messages.BlocksPinned) -> None:
        """Hands an answer on."""
        offloader = self._offloaders.get(domain.index)
        if offloader is not None:
            offloader.pinned(report)

    async def close(self) -> None:
        """Ends all tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for offloader in self._offloaders.values():
            await offloader.close()

    async def _onboard(self, domain: Domain, wanted: messages.OnboardWanted) -> None:
        answer = messages.OnboardReady(wanted.key, 0)
        try:
            answer = await Onboarding(self._worker, domain, self._stores, wanted).run()
        finally:
            domain.send(answer)

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("L3 task failed unexpectedly", task=task.get_name(), exc_info=error)
