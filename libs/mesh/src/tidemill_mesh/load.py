"""The latest load report of each cache domain, aged by the receiver's own clock."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from tidemill.mesh.v1 import common_pb2, events_pb2, membership_pb2
from tidemill_mesh.bus import Bus, Subscription
from tidemill_mesh.membership import InstanceView
from tidemill_mesh.metrics import Metrics

MAX_RETIRED_RUNS = 8

DomainKey = tuple[str, int]

log = structlog.get_logger()


@dataclass(frozen=True)
class LoadSample:
    """A report and when it arrived, by the monotonic clock."""

    report: events_pb2.LoadReport
    arrived: float


def load_subject(mesh: str, instance: str = "*") -> str:
    """NATS subject of an instance's load reports; "*": of all."""
    return f"tidemill.{mesh}.load.{instance}"


def kv_subject(mesh: str, instance: str = "*") -> str:
    """NATS subject of an instance's KV events; "*": of all."""
    return f"tidemill.{mesh}.kv.{instance}"


def busy(report: events_pb2.LoadReport) -> bool:
    """True if the domain has any request."""
    return bool(report.waiting_requests or report.running_requests or report.held_requests)


class LoadView:
    """samples: latest report by (instance, domain); reports of older incarnations, epochs or sequences are refused."""

    def __init__(
        self,
        bus: Bus,
        instances: InstanceView,
        mesh: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.samples: dict[DomainKey, LoadSample] = {}
        self.on_report: list[Callable[[events_pb2.LoadReport], None]] = []
        # Runs seen to be over: while etcd is away nothing else tells a thawed old process from a new one.
        self._retired: dict[DomainKey, deque[tuple[str, str]]] = {}
        self._bus = bus
        self._instances = instances
        self._mesh = mesh
        self._clock = clock
        self._refused = metrics.counter("load_reports_refused_total", "Load reports not used, by reason.", ("reason",))
        self._subscription: Subscription | None = None
        self._stop_observing: Callable[[], None] | None = None

    async def start(self) -> None:
        """Subscribes."""
        self._stop_observing = self._instances.subscribe(self._on_instance)
        self._subscription = await self._bus.subscribe(load_subject(self._mesh), self._on_message)

    async def close(self) -> None:
        """Ends the subscription; the samples stay readable."""
        if self._stop_observing is not None:
            self._stop_observing()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def latest(self, instance: str, domain: int) -> events_pb2.LoadReport | None:
        """The latest report of a domain."""
        sample = self.samples.get((instance, domain))
        return sample.report if sample else None

    def age_s(self, instance: str, domain: int) -> float:
        """Seconds since the latest report of a domain arrived; infinite without one."""
        sample = self.samples.get((instance, domain))
        return self._clock() - sample.arrived if sample else float("inf")

    def accept(self, report: events_pb2.LoadReport) -> bool:
        """Takes a report unless something newer is known."""
        reason = self._reason_to_refuse(report)
        if reason:
            self._refused.labels(reason=reason).inc()
            return False
        key = (report.domain.instance, report.domain.domain)
        last = self.samples.get(key)
        if last is not None and not _same_run(last.report.domain, report.domain):
            runs = self._retired.setdefault(key, deque(maxlen=MAX_RETIRED_RUNS))
            runs.append((last.report.domain.incarnation, last.report.domain.epoch))
        self.samples[key] = LoadSample(report, self._clock())
        for callback in self.on_report:
            callback(report)
        return True

    def _on_message(self, _subject: str, payload: bytes) -> None:
        try:
            self.accept(events_pb2.LoadReport.FromString(payload))
        except DecodeError:
            self._refused.labels(reason="unreadable").inc()

    def _reason_to_refuse(self, report: events_pb2.LoadReport) -> str:
        domain = report.domain
        record = self._instances.records.get(domain.instance)
        if record is not None and self._instances.connected:
            if record.incarnation != domain.incarnation:
                return "incarnation"
            known = _epoch_of(record, domain)
            if known and known != domain.epoch:
                return "epoch"
        last = self.samples.get((domain.instance, domain.domain))
        if last is not None and _same_run(last.report.domain, domain) and report.sequence <= last.report.sequence:
            return "sequence"
        run = (domain.incarnation, domain.epoch)
        if run in self._retired.get((domain.instance, domain.domain), ()):
            return "retired"
        return ""

    def _on_instance(
        self, old: membership_pb2.MembershipRecord | None, new: membership_pb2.MembershipRecord | None
    ) -> None:
        if old is None or (new is not None and new.incarnation == old.incarnation):
            return
        for key in [key for key in self.samples if key[0] == old.instance]:
            sample = self.samples[key].report.domain
            if new is None or sample.incarnation != new.incarnation:
                del self.samples[key]
        if new is None:
            self._retired = {key: runs for key, runs in self._retired.items() if key[0] != old.instance}


def _epoch_of(record: membership_pb2.MembershipRecord, domain: common_pb2.DomainRef) -> str:
    return next((item.epoch for item in record.domains if item.domain == domain.domain), "")


def _same_run(one: common_pb2.DomainRef, other: common_pb2.DomainRef) -> bool:
    return one.incarnation == other.incarnation and one.epoch == other.epoch
