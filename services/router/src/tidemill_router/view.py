"""The targets that could serve a model, from membership, load reports, fences and reservations."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import (
    ROLE_DECODE,
    ROLE_KVSTORE,
    ROLE_PREFILL,
    DomainRecord,
    MembershipRecord,
    Role,
)
from tidemill_kvcache.domain_track import Holder
from tidemill_mesh.load import LoadSample
from tidemill_router.candidate import Candidate
from tidemill_router.fences import Fences
from tidemill_router.report_times import NEVER, ReportTimes
from tidemill_router.reservations import Reservations

WORKER_ROLES = (ROLE_PREFILL, ROLE_DECODE)


class Instances(Protocol):
    """What is read of the InstanceView."""

    records: dict[str, MembershipRecord]
    connected: bool


class Loads(Protocol):
    """What is read of the LoadView."""

    @property
    def samples(self) -> Mapping[Holder, LoadSample]:
        """Latest report by (instance, domain)."""


class MeshView:
    """The router's picture of the workers at this moment."""

    def __init__(
        self,
        instances: Instances,
        loads: Loads,
        fences: Fences,
        reservations: Reservations,
        times: ReportTimes,
        clock: Callable[[], float],
    ) -> None:
        self._instances = instances
        self._loads = loads
        self._fences = fences
        self._reservations = reservations
        self._times = times
        self._clock = clock
        self._seen_revisions: set[str] = set()
        self._known_since: dict[str, tuple[str, float]] = {}

    def see(self, record: MembershipRecord) -> None:
        """Remembers which models there have been, and since when this run of the instance is known."""
        self._seen_revisions.update(model.revision for model in record.models)
        incarnation, _ = self._known_since.get(record.instance, ("", NEVER))
        if incarnation != record.incarnation:
            self._known_since[record.instance] = (record.incarnation, self._clock())

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._known_since.pop(instance, None)

    def knows(self, revision: str) -> bool:
        """False when workers are there but none has ever served that revision."""
        return revision in self._seen_revisions or not self.workers()

    def workers(self) -> list[MembershipRecord]:
        """Records of prefill and decode instances."""
        return [record for record in self._instances.records.values() if record.role in WORKER_ROLES]

    @property
    def leaving_stores(self) -> set[str]:
        """kvstores that drain: nobody asks them any more."""
        records = self._instances.records.values()
        return {record.instance for record in records if record.role == ROLE_KVSTORE and record.draining}

    @property
    def silent_stores(self) -> set[str]:
        """kvstores that do not tell of snapshots."""
        records = self._instances.records.values()
        return {record.instance for record in records if record.role == ROLE_KVSTORE and not record.tells_snapshots}

    def card_digest(self, revision: str) -> str:
        """Digest of the ModelCard of a revision; empty when nobody serves it now."""
        models = (model for record in self.workers() for model in record.models if model.revision == revision)
        return next((model.card_digest for model in models), "")

    def candidates(self, role: "Role.ValueType", revision: str, excluded: Collection[str] = ()) -> list[Candidate]:
        """Targets of a role that serve the revision, less those excluded, draining or fenced."""
        return [
            candidate
            for record in self._instances.records.values()
            if record.role == role and record.instance not in excluded and self._usable(record, revision)
            for domain in record.domains
            if (candidate := self._candidate(record, domain, revision)) is not None
        ]

    @property
    def num_quarantined_pairs(self) -> int:
        """Pairs of instances across which nothing is placed, as their takers report."""
        reports = [(record.instance, self.domain_of(record, d)[1]) for record in self.workers() for d in record.domains]
        return len({(name, source) for name, report in reports if report for source in shut_out(report)})

    def reported_at(self, holder: Holder) -> float:
        """When the latest load report of a target arrived; minus infinity without one."""
        sample = self._loads.samples.get(holder)
        return sample.arrived if sample else NEVER

    def domain_of(self, record: MembershipRecord, domain: DomainRecord) -> tuple[DomainRef, LoadReport | None]:
        """The domain's present identity and its load report, if that is of the same identity.

        While etcd is away a report of the same process may know of a newer epoch than the record.
        """
        ref = DomainRef(
            instance=record.instance, incarnation=record.incarnation, domain=domain.domain, epoch=domain.epoch
        )
        sample = self._loads.samples.get((record.instance, domain.domain))
        if sample is None or sample.report.domain.incarnation != record.incarnation:
            return ref, None
        if not self._instances.connected:
            return sample.report.domain, sample.report
        return ref, sample.report if sample.report.domain.epoch == domain.epoch else None

    def _usable(self, record: MembershipRecord, revision: str) -> bool:
        serves = any(model.revision == revision for model in record.models)
        return serves and not record.draining and not self._fences.is_fenced(record.instance, record.incarnation)

    def _candidate(self, record: MembershipRecord, domain: DomainRecord, revision: str) -> Candidate | None:
        holder = (record.instance, domain.domain)
        ref, report = self.domain_of(record, domain)
        if not ref.epoch or (report is not None and report.draining):
            return None
        now, changed_at_s = self._clock(), self._times.changed_at(holder)
        recent_tokens = self._reservations.turnover.recent_tokens(holder)
        kv_format = next(model.kv_format for model in record.models if model.revision == revision)
        if report is None:
            # Its first report may be on the way: it is as old as our knowledge of the instance, not older.
            _, known_since_s = self._known_since.get(record.instance, ("", NEVER))
            claims = self._reservations.claims(holder, NEVER)
            return Candidate(
                holder, ref, record.endpoint, domain.num_blocks, age_s=now - known_since_s, claims=claims,
                recent_tokens=recent_tokens, kv_format=kv_format, tells_snapshots=record.tells_snapshots,
            )  # fmt: skip
        return Candidate(
            holder,
            ref,
            record.endpoint,
            domain.num_blocks,
            load=report,
            age_s=now - self.reported_at(holder),
            unchanged_s=now - changed_at_s,
            idle_s=now - self._times.worked_at(holder),
            claims=self._reservations.claims(holder, self._times.known_until(holder)),
            computed_tokens=self._reservations.computed.tokens_since(holder, changed_at_s),
            recent_tokens=recent_tokens,
            kv_format=kv_format,
            tells_snapshots=record.tells_snapshots,
        )


def shut_out(report: LoadReport) -> set[str]:
    """Instances from which nothing should come to the sender."""
    return {*report.quarantined, *(source.instance for source in report.silent)}
