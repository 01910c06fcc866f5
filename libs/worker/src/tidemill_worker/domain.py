"""One cache domain: its ranks start, fail and restart as a unit, and each run of it has its own epoch."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from tidemill_engine import messages
from tidemill_worker.launch import RankLaunch
from tidemill_worker.rank_link import RankLink, RankStartError
from tidemill_worker.restarts import RestartPolicy

log = structlog.get_logger()

# What keeps a domain from its first start (a missing transport, a model that does not fit) rarely mends itself.
FIRST_STARTS = 2


class DomainHooks(Protocol):
    """What a domain tells its owner; all calls are made on the event loop and return at once."""

    def domain_up(self, domain: "Domain") -> None:
        """All ranks are ready; a new epoch begins."""

    def domain_down(self, domain: "Domain", reason: str) -> None:
        """The epoch has ended; called once for each `domain_up`."""

    def domain_reports(self, domain: "Domain", rank: int, reports: list[messages.Report]) -> None:
        """A rank reports while the domain is up."""


class Domain:
    """Runs the ranks of one cache domain for the life of the service."""

    def __init__(
        self,
        index: int,
        plan: Callable[[int], Sequence[RankLaunch]],
        policy: RestartPolicy,
        hooks: DomainHooks,
        *,
        start_timeout_s: float,
        watchdog_s: float,
    ) -> None:
        self.index = index
        self.epoch = ""
        self.up = False
        self.starts = 0
        self.given_up = False
        self.was_up = False
        self.ready: list[messages.RankReady] = []
        self.last_failure = ""
        self._plan = plan
        self._policy = policy
        self._hooks = hooks
        self._start_timeout_s = start_timeout_s
        self._watchdog_s = watchdog_s
        self._links: list[RankLink] = []

    @property
    def pids(self) -> list[int]:
        """Of the rank processes, in rank order."""
        return [link.pid for link in self._links]

    def send(self, *commands: messages.Command) -> None:
        """Sends commands to the leader."""
        self.send_rank(0, *commands)

    def send_rank(self, rank: int, *commands: messages.Command) -> None:
        """Sends commands to one rank; a domain that is down drops them, its requests have ended with it."""
        if self.up:
            self._links[rank].send(commands)

    async def run(self) -> None:
        """Starts the domain, and again after each failure, until it failed too often."""
        while True:
            try:
                reason = await self._run_once()
            finally:
                await self._kill_all()
            self.last_failure = reason
            delay_s = self._policy.failed()
            if delay_s is None or (not self.was_up and self.starts >= FIRST_STARTS):
                self.given_up = True
                log.error("cache domain stays down after too many failures", domain=self.index, reason=reason)
                return
            log.warning("cache domain failed, restarting", domain=self.index, reason=reason, delay_s=delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> str:
        """One epoch; returns why it ended."""
        self.starts += 1
        try:
            launches = self._plan(self.starts)
            self._links = [self._link(rank, launch) for rank, launch in enumerate(launches)]
            self.ready = await self._start_all()
        except (RankStartError, OSError, ValueError) as error:
            return str(error)
        self.epoch = secrets.token_hex(6)
        self.up = self.was_up = True
        self._hooks.domain_up(self)
        log.info("cache domain ready", domain=self.index, epoch=self.epoch, backend=self.ready[0].backend)
        reason = "its service ended"
        try:
            reason = await self._first_failure()
        finally:
            self.up = False
            self._hooks.domain_down(self, reason)
        return reason

    def _link(self, rank: int, launch: RankLaunch) -> RankLink:
        def on_reports(reports: list[messages.Report]) -> None:
            if self.up:
                self._hooks.domain_reports(self, rank, reports)

        return RankLink(launch.name, launch.argv, launch.env, launch.socket_path, launch.log_path, on_reports)

    async def _start_all(self) -> list[messages.RankReady]:
        """Starts all ranks at once; the first that fails ends the others' start."""
        tasks = [asyncio.create_task(link.start(self._start_timeout_s)) for link in self._links]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_failure(self) -> str:
        watchers = [asyncio.create_task(self._watch(link)) for link in self._links]
        watchers.append(asyncio.create_task(self._watch_progress(self._links[0])))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, link: RankLink) -> str:
        return f"{link.name} {await link.gone()}"

    async def _watch_progress(self, leader: RankLink) -> str:
        """Only the leader reports steps; a frozen follower stops the leader at the next step."""
        silent_s = 0.0
        while silent_s < self._watchdog_s:
            await asyncio.sleep(self._watchdog_s - silent_s + 0.01)
            silent_s = time.monotonic() - leader.last_report_at
        return f"{leader.name} reported nothing for {self._watchdog_s:g} s"

    async def _kill_all(self) -> None:
        links, self._links = self._links, []
        await asyncio.gather(*(link.kill() for link in links))
