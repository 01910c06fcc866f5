"""The parts of a router process, made and tied together."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import ROLE_GATEWAY, ROLE_KVSTORE, ROLE_ROUTER, MembershipRecord
from tidemill_kvcache.index import BlockIndex
from tidemill_kvcache.tracker import EventTracker
from tidemill_mesh.bus import Bus
from tidemill_mesh.load import LoadView
from tidemill_mesh.membership import InstanceView
from tidemill_mesh.service import ServiceContext
from tidemill_router.candidate import Costs
from tidemill_router.cards import Cards
from tidemill_router.fences import Fences
from tidemill_router.kv_feed import KvFeed
from tidemill_router.local_prefill import NAME as LOCAL_PREFILL
from tidemill_router.local_prefill import LocalPrefill
from tidemill_router.metrics import RouterMetrics
from tidemill_router.no_hand_overs import NAME as NO_HAND_OVERS
from tidemill_router.no_hand_overs import NoHandOvers
from tidemill_router.replica_link import ReplicaLink, reservation_subject
from tidemill_router.replica_log import ReplicaLog
from tidemill_router.replicas import Replicas
from tidemill_router.report_times import ReportTimes
from tidemill_router.reservations import Reservations
from tidemill_router.router import Router
from tidemill_router.settings import RouterSettings
from tidemill_router.snapshot_fetcher import SnapshotFetcher
from tidemill_router.turnover import Turnover
from tidemill_router.view import WORKER_ROLES, MeshView

HOUSEKEEPING_S = 0.1
SNAPSHOT_RPC = "tidemill.mesh.v1.WorkerService/GetSnapshot"


@dataclass
class RouterParts:
    """Everything that lives as long as the process."""

    instances: InstanceView
    bus: Bus
    view: MeshView
    index: BlockIndex
    tracker: EventTracker
    reservations: Reservations
    fences: Fences
    times: ReportTimes
    cards: Cards
    feed: KvFeed
    fetcher: SnapshotFetcher
    replicas: Replicas
    replica_log: ReplicaLog
    link: ReplicaLink
    me: Callable[[], InstanceRef]
    router: Router
    metrics: RouterMetrics
    clock: Callable[[], float]
    no_hand_overs: NoHandOvers = field(default_factory=NoHandOvers)

    def on_record(self, old: MembershipRecord | None, new: MembershipRecord | None) -> None:
        """An instance came, changed or left."""
        if new is None:
            assert old is not None, "a change has a record"
            self._forget(old.instance)
            return
        self.fences.forget(new.instance, keep_incarnation=new.incarnation)
        if new.role == ROLE_GATEWAY:
            self.reservations.drop_owner(new.instance, keep_incarnation=new.incarnation)
        elif new.role in WORKER_ROLES:
            self.view.see(new)
            self.reservations.drop_target(new.instance, keep_incarnation=new.incarnation)
            for domain in new.domains:
                self._register(new, domain.domain, domain.epoch)
        elif new.role == ROLE_KVSTORE:
            self._register(new, 0, new.incarnation)
        elif new.role == ROLE_ROUTER and new.instance != self.me().instance:
            self.replicas.register(new.instance, new.incarnation)

    def on_report(self, report: LoadReport) -> None:
        """A load report arrived."""
        self.times.on_report(report)
        self.fences.heard_from(report.domain.instance, report.domain.incarnation)

    async def housekeeping(self) -> None:
        """Ends overdue reservations and copies metrics until cancelled."""
        while True:
            self.reservations.expire()
            self.router.local_prefill.observe(self.view)
            self.metrics.degraded.labels(step=LOCAL_PREFILL).set(self.router.local_prefill.num_on)
            self.no_hand_overs.observe(self.view)
            self.metrics.degraded.labels(step=NO_HAND_OVERS).set(self.no_hand_overs.num_on)
            self.metrics.quarantined_pairs.set(self.view.num_quarantined_pairs)
            self.metrics.collect(
                self.index,
                self.tracker,
                self.reservations,
                self.fences,
                self.feed,
                self.fetcher,
                self.replicas,
                etcd_connected=self.instances.connected,
            )
            await asyncio.sleep(HOUSEKEEPING_S)

    def _forget(self, instance: str) -> None:
        self.tracker.forget(instance)
        self.replicas.forget(instance)
        self.fences.forget(instance)
        self.times.forget(instance)
        self.view.forget(instance)
        self.reservations.turnover.forget(instance)
        self.reservations.computed.forget(instance)
        self.reservations.drop_owner(instance)
        self.reservations.drop_target(instance)

    def _register(self, record: MembershipRecord, domain: int, epoch: str) -> None:
        if epoch:
            ref = DomainRef(instance=record.instance, incarnation=record.incarnation, domain=domain, epoch=epoch)
            self.tracker.register(ref, has_snapshot=record.role in WORKER_ROLES or SNAPSHOT_RPC in record.rpcs)


def make_parts(context: ServiceContext, settings: RouterSettings, loads: LoadView) -> RouterParts:
    """Wires the parts."""
    clock = time.monotonic
    index = BlockIndex(settings.index_max_bytes)
    tracker = EventTracker(index, clock)
    fences = Fences(clock)
    stand_s = settings.reservation_s or 3 * settings.liveness_s
    turnover = Turnover(settings.turnover_half_life_s, clock)
    reservations = Reservations(context.membership.incarnation[:8], stand_s, clock, turnover)

    def me() -> InstanceRef:
        return InstanceRef(instance=context.instance, incarnation=context.membership.incarnation)

    replica_log = ReplicaLog(me, clock)
    reservations.observer = replica_log
    replicas = Replicas(reservations, replica_log, clock)
    times = ReportTimes(clock)
    view = MeshView(context.instances, loads, fences, reservations, times, clock)
    cards = Cards(view.workers, context.channels, clock)
    records = context.instances.records

    def endpoint_of(instance: str) -> str:
        return records[instance].endpoint if instance in records else ""

    fetcher = SnapshotFetcher(
        tracker,
        context.channels,
        endpoint_of,
        clock,
        concurrency=settings.snapshot_concurrency,
        timeout_s=settings.snapshot_timeout_s,
    )
    subject = reservation_subject(settings.mesh, context.instance)
    link = ReplicaLink(replicas, replica_log, context.bus, subject, context.channels, endpoint_of, clock)
    local_prefill = LocalPrefill(settings.local_prefill_load, settings.local_prefill_tokens, clock)
    router = Router(
        view,
        index,
        reservations,
        cards.facts,
        costs_of(settings),
        settings.max_queue_s,
        random.Random(),
        local_prefill,
    )
    return RouterParts(
        context.instances,
        context.bus,
        view,
        index,
        tracker,
        reservations,
        fences,
        times,
        cards,
        KvFeed(tracker),
        fetcher,
        replicas,
        replica_log,
        link,
        me,
        router,
        RouterMetrics(context.metrics),
        clock,
    )


def costs_of(settings: RouterSettings) -> Costs:
    """The part of the settings that predictions use."""
    return Costs(**{name: getattr(settings, name) for name in Costs.__dataclass_fields__ if hasattr(settings, name)})
