"""From membership, load reports and started processes to what the decision sees of a pool."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill_autoscaler.actuator import Managed
from tidemill_autoscaler.observation import Observation, Pending, Worker
from tidemill_mesh.load import LoadView
from tidemill_mesh.membership import InstanceView

ROLE_OF = {"prefill": Role.ROLE_PREFILL, "decode": Role.ROLE_DECODE}


@dataclass(frozen=True)
class PoolView:
    """Reads one pool of a model from the mesh."""

    role: str
    model: str
    instances: InstanceView
    loads: LoadView
    clock: Callable[[], float] = time.time

    def observe(self, managed: Sequence[Managed], source_healthy: bool) -> Observation:
        """The pool now, given what the actuator knows."""
        ours = {item.instance: item for item in managed}
        records = [record for record in self.instances.records.values() if self._belongs(record)]
        workers = tuple(self._worker(record, ours.get(record.instance)) for record in records)
        registered = {record.instance for record in records}
        waiting = [item for item in managed if item.instance not in registered and not item.stopping]
        pending = tuple(Pending(instance=item.instance, age_s=item.age_s, alive=item.alive) for item in waiting)
        return Observation(workers, pending, source_healthy)

    def _belongs(self, record: MembershipRecord) -> bool:
        serves = not self.model or any(self.model in (model.name, *model.aliases) for model in record.models)
        return record.role == ROLE_OF[self.role] and serves

    def _worker(self, record: MembershipRecord, managed: Managed | None) -> Worker:
        reports = [self.loads.latest(record.instance, domain.domain) for domain in record.domains]
        ages = [self.loads.age_s(record.instance, domain.domain) for domain in record.domains]
        known = [report for report in reports if report is not None]
        return Worker(
            instance=record.instance,
            age_s=max(0.0, self.clock() - record.started_unix_ms / 1000),
            draining=record.draining or bool(managed and managed.stopping),
            managed=managed is not None,
            idle=not any(busy(report) for report in known),
            slo_load=worst(known),
            load_age_s=max(ages, default=math.inf),
        )


def busy(report: LoadReport) -> bool:
    """True if the domain has any request."""
    return bool(report.waiting_requests or report.running_requests or report.held_requests)


def worst(reports: Sequence[LoadReport]) -> float:
    """The highest SLO load of an instance's domains; NaN if one is not a number, 0 without domains."""
    loads = [report.slo_load for report in reports]
    return math.nan if any(math.isnan(load) for load in loads) else max(loads, default=0.0)
