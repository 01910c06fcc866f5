"""From membership, load reports and started processes to what the decision sees of a pool."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill_autoscaler.actuator import Managed
from tidemill_autoscaler.observation import Observation, Pending, Worker
from tidemill_autoscaler.prediction import predict
from tidemill_mesh.load import LoadView, busy
from tidemill_mesh.membership import InstanceView

ROLE_OF = {"prefill": Role.ROLE_PREFILL, "decode": Role.ROLE_DECODE}


@dataclass(frozen=True)
class PoolView:
    """Reads one pool of a model from the mesh.

    A worker's age counts from when it was first seen here: its own clock, and a stepped one, would tell anything.
    """

    role: str
    model: str
    instances: InstanceView
    loads: LoadView
    clock: Callable[[], float] = time.monotonic
    first_seen: dict[tuple[str, int], float] = field(default_factory=dict)

    def observe(self, managed: Sequence[Managed], source_healthy: bool) -> Observation:
        """The pool now, given what the actuator knows."""
        ours = {item.instance: item for item in managed}
        records = [record for record in self.instances.records.values() if self._belongs(record)]
        self._note(records)
        workers = tuple(self._worker(record, ours.get(record.instance)) for record in records)
        registered = {record.instance for record in records}
        waiting = [item for item in managed if item.instance not in registered and not item.stopping]
        pending = tuple(Pending(instance=item.instance, age_s=item.age_s, alive=item.alive) for item in waiting)
        return Observation(workers, pending, source_healthy)

    def _belongs(self, record: MembershipRecord) -> bool:
        serves = not self.model or any(self.model in (model.name, *model.aliases) for model in record.models)
        return record.role == ROLE_OF[self.role] and serves

    def _note(self, records: Sequence[MembershipRecord]) -> None:
        """Keeps when each run of a worker was first seen, for as long as it is there."""
        runs = {run_of(record) for record in records}
        for run in runs:
            self.first_seen.setdefault(run, self.clock())
        for gone in self.first_seen.keys() - runs:
            del self.first_seen[gone]

    def _worker(self, record: MembershipRecord, managed: Managed | None) -> Worker:
        reports = [self.loads.latest(record.instance, domain.domain) for domain in record.domains]
        ages = [self.loads.age_s(record.instance, domain.domain) for domain in record.domains]
        known = [report for report in reports if report is not None]
        return Worker(
            instance=record.instance,
            age_s=self.clock() - self.first_seen[run_of(record)],
            draining=record.draining or bool(managed and managed.stopping),
            managed=managed is not None,
            idle=not any(busy(report) for report in known),
            slo_load=worst(known),
            fixed_load=min((predict(report).fixed for report in known), default=0.0),
            load_age_s=max(ages, default=math.inf),
        )


def run_of(record: MembershipRecord) -> tuple[str, int]:
    """Names one run of a process; unlike its incarnation it outlives the loss of a lease."""
    return record.instance, record.started_unix_ms


def worst(reports: Sequence[LoadReport]) -> float:
    """The highest SLO load of an instance's domains, measured or predicted; NaN if one is not a number, 0 without
    domains."""
    loads = [load for report in reports for load in (report.slo_load, predict(report).load)]
    return math.nan if any(math.isnan(load) for load in loads) else max(loads, default=0.0)
