"""What prefill and decode have in common: wires a worker from its settings and runs it until it has drained."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh.errors import StartError
from tidemill_mesh.membership import Registration
from tidemill_mesh.owned_folders import owned_folder
from tidemill_mesh.server import GrpcServer, Servicer, serve_grpc
from tidemill_mesh.service import ServiceContext
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.domain import Domain
from tidemill_worker.drain import finish_running
from tidemill_worker.kv_events import KvEvents
from tidemill_worker.launch import RANK_MODULE, plan_ranks
from tidemill_worker.load_reports import LoadReporter
from tidemill_worker.model_card import Assets, make_card, make_ref
from tidemill_worker.model_files import ModelFiles, ModelFolderError, read_model_files
from tidemill_worker.reaper import reap
from tidemill_worker.reports import ReportHandler
from tidemill_worker.restarts import RestartPolicy
from tidemill_worker.roll_calls import RollCalls
from tidemill_worker.servicers import RPCS, TransferServicer, WorkerServicer, servicers
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.status import holds_of
from tidemill_worker.tickets import TicketBook
from tidemill_worker.tier_watch import TierAlarm
from tidemill_worker.tiers import Tiers
from tidemill_worker.transfers import RankTransfers
from tidemill_worker.worker import Worker

log = structlog.get_logger()

CONTRACT_REVISION = 1
MAX_BACKOFF_S = 30.0


async def run_worker(
    context: ServiceContext, role: "membership_pb2.Role.ValueType", rank_module: Sequence[str] = RANK_MODULE
) -> None:
    """The main function of prefill and decode; `rank_module` is the command that starts a rank."""
    assert isinstance(context.settings, WorkerSettings), "a worker has worker settings"
    if not context.settings.model:
        raise ModelFolderError("no model is named: set --model to a model folder")
    files = await asyncio.to_thread(read_model_files, Path(context.settings.model), context.settings.weights)
    async with AsyncExitStack() as stack:
        socket_dir = stack.enter_context(owned_folder())
        body = WorkerBody(context, context.settings, role, files)
        stack.push_async_callback(body.close)
        body.worker.domains += make_domains(context.settings, body.reports, socket_dir, rank_module)
        body.server = await stack.enter_async_context(serve_grpc(context.settings, body.servicers()))
        try:
            await run_until_drained(context, body)
        except ExceptionGroup as failed:
            no_start = failed.subgroup(WorkerStartError)
            if no_start is None:
                raise
            raise no_start.exceptions[0] from None


async def run_until_drained(context: ServiceContext, body: "WorkerBody") -> None:
    """Keeps the worker going; a part that fails ends all others, in a group of exceptions."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(domain.run(), name=f"domain {domain.index}") for domain in body.worker.domains]
        tasks.append(group.create_task(require_a_start(body.worker.domains, list(tasks)), name="first start"))
        tasks.append(group.create_task(body.keep_time(), name="load and deadlines"))
        tasks.append(group.create_task(body.follow_domains(), name="membership of domains"))
        await context.drain.requested.wait()
        await body.drain()
        for task in tasks:
            task.cancel()


class WorkerStartError(StartError):
    """No rank could be started; the message says why."""


async def require_a_start(domains: Sequence[Domain], runs: Sequence[asyncio.Task[None]]) -> None:
    """Ends the service when all its domains gave up before any was ever ready."""
    await asyncio.wait(runs)
    if not any(domain.was_up for domain in domains):
        raise WorkerStartError(f"no rank could be started: {domains[0].last_failure}")


def make_domains(
    settings: WorkerSettings, hooks: ReportHandler, socket_dir: Path, rank_module: Sequence[str]
) -> list[Domain]:
    """The cache domains of an instance; none runs yet."""
    return [
        Domain(
            index,
            partial(plan_ranks, settings, index, socket_dir=socket_dir, rank_module=rank_module),
            RestartPolicy(
                limit=settings.restart_limit,
                window_s=settings.restart_window_s,
                backoff_s=settings.restart_backoff_s,
                max_backoff_s=MAX_BACKOFF_S,
                clock=time.monotonic,
            ),
            hooks,
            start_timeout_s=settings.start_timeout_s,
            watchdog_s=settings.rank_watchdog_s,
        )
        for index in range(settings.dp_size)
    ]


class WorkerBody:
    """One worker instance in its process: the parts, and what keeps them going."""

    def __init__(
        self,
        context: ServiceContext,
        settings: WorkerSettings,
        role: "membership_pb2.Role.ValueType",
        files: ModelFiles,
    ) -> None:
        counts = WorkerCounts(context.metrics)
        self.worker = Worker(
            settings=settings,
            role=role,
            instance=context.instance,
            channels=context.channels,
            counts=counts,
            tickets=TicketBook(time.monotonic),
            transfers=RankTransfers(settings.transfer_bytes_per_s, counts.transferred),
            incarnation=context.membership.incarnation,
            hash_root=files.hash_root,
        )
        self.server: GrpcServer | None = None
        self._context = context
        self._files = files
        self._assets = Assets()
        self._drain_s: float | None = None
        self._registration: Registration | None = None
        self._events = KvEvents(self.worker, context.bus.publish)
        self._load = LoadReporter(self.worker, context.bus.publish)
        self._tiers = Tiers(self.worker, context.instances, self._events.moved, self._load.latest)
        self._roll_calls = RollCalls(self.worker)
        self._tier_alarm = TierAlarm(counts, settings.one_way_tier_blocks, settings.one_way_tier_s)
        self.worker.admitted = self._tiers.submitted
        self.reports = ReportHandler(
            self.worker,
            [self._events, self._tiers],
            self._tiers,
            self._load,
            self._roll_calls,
            first_ready=self._first_ready,
        )

    def servicers(self) -> Sequence[Servicer]:
        """The gRPC services."""
        worker_servicer = WorkerServicer(
            self.worker,
            self._events,
            self._load,
            self._assets,
            record=self.record,
            tiers=self._tiers,
            submitted=self.reports.submitted,
            drain=self._request_drain,
            holds=self._holds,
        )
        return servicers(worker_servicer, TransferServicer(self.worker, self._tiers))

    def record(self) -> membership_pb2.MembershipRecord:
        """What membership says of this worker now."""
        worker = self.worker
        return membership_pb2.MembershipRecord(
            instance=worker.instance,
            incarnation=worker.incarnation,
            role=worker.role,
            version=self._context.version,
            contract_revision=CONTRACT_REVISION,
            rpcs=RPCS,
            endpoint=self.server.endpoint if self.server else "",
            stream_endpoint=self.server.stream_endpoint if self.server else "",
            http_endpoint=self._context.http_endpoint,
            draining=worker.draining,
            domains=worker.domain_records(),
            models=[worker.model] if worker.model.card_digest else [],
            started_unix_ms=self._context.started_unix_ms,
            pid=os.getpid(),
            host=socket.gethostname(),
            tells_snapshots=True,
        )

    async def keep_time(self) -> None:
        """Load reports, event heartbeats and deadlines, whether or not there is work."""
        while True:
            reap(self.worker)
            self._roll_calls.call_due()
            self._load.publish_all()
            self._events.heartbeat()
            self._show_state()
            await asyncio.sleep(self.worker.settings.load_interval_s)

    async def follow_domains(self) -> None:
        """Registers once a domain is ready; tells membership and health what came up or went down since."""
        while True:
            await self.reports.changed.wait()
            self.reports.changed.clear()
            await self._tell()

    async def drain(self) -> None:
        """Refuses new work, lets running work end, then leaves the mesh."""
        self.worker.draining = True
        await self._tell()
        deadline_s = self._context.drain.deadline_s
        await finish_running(self.worker, deadline_s if self._drain_s is None else min(self._drain_s, deadline_s))
        if self._registration is not None:
            await self._registration.deregister()

    async def close(self) -> None:
        """Ends what is still under way."""
        await self.reports.close()
        await self._tiers.close()

    async def _tell(self) -> None:
        assert self.server is not None, "the server listens before any rank starts"
        self.server.set_serving(not self.worker.draining and any(domain.up for domain in self.worker.domains))
        if self._registration is not None:
            await self._registration.update(self.record())
        elif self.worker.model.card_digest and not self.worker.draining:
            self._registration = await self._context.membership.register(self.record())
            self._registration.on_new_incarnation.append(self._new_incarnation)
            await self._context.publish_run_file(self.server.endpoint)

    def _holds(self) -> dict[str, int]:
        return holds_of(self.worker, [sample for _, sample in self._load.samples()], self._tiers.holds())

    def _show_state(self) -> None:
        self.worker.counts.loads(self._load.reports())
        self.worker.counts.state(self._holds(), [domain.up for domain in self.worker.domains])
        self.worker.counts.l2_use(self._tiers.l2_use())
        self.worker.counts.quarantined(len(self.worker.quarantine.sources()))
        self.worker.counts.silent(len(self.worker.silent.pairs()))
        self._tier_alarm.look()

    def _first_ready(self, domain: Domain) -> None:
        """The first ready rank tells what the model's card still lacks."""
        card = make_card(self.worker.settings, self._files, domain.ready[0], self._assets)
        self.worker.model = make_ref(card, self._assets)
        self.worker.kv_bytes_per_token = card.kv_bytes_per_token
        log.info("model loaded", model=card.name, revision=card.revision, kv_format=card.kv_format)

    def _new_incarnation(self, incarnation: str) -> None:
        self.worker.incarnation = incarnation
        self._events.new_incarnation()

    def _request_drain(self, deadline_s: float) -> None:
        self._drain_s = deadline_s
        self._context.drain.request()
