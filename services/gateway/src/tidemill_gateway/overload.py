"""Degraded step "shed_low": while no instance of some kind keeps near its target, requests of low classes are refused.

Everybody else keeps what there is. A refusal says when the overload is predicted to be over:

    prompts wait too long    the predicted time to the first token at the best instance, less the target
    tokens come too slowly   the share of running requests that has to end, of the time that requests take
"""

from collections.abc import Callable, Iterable

import structlog

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.v1 import errors_pb2
from tidemill_kvcache.degraded import DegradedStep, Marks
from tidemill_mesh.errors import MeshError
from tidemill_mesh.load import busy

NAME = "shed_low"
OFF_SHARE = 0.6
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

log = structlog.get_logger()


class Overload:
    """Looks at the load reports of all workers, and refuses while the step is on."""

    def __init__(
        self,
        load: float,
        below_priority: int,
        clock: Callable[[], float],
        mean_request_s: Callable[[], float],
    ) -> None:
        self.on_change: Callable[[bool], None] = lambda is_on: None
        self.on_refused: Callable[[str], None] = lambda limit: None
        self._below = below_priority
        self._mean_request_s = mean_request_s
        self._retry_s = MIN_RETRY_S
        marks = Marks(load, load * OFF_SHARE) if load > 0 else None
        self._step = DegradedStep(NAME, marks, clock, self._changed) if marks else None

    @property
    def is_on(self) -> bool:
        """Whether low classes are refused now."""
        return self._step is not None and self._step.is_on

    def observe(self, reports: Iterable[LoadReport]) -> None:
        """Takes the latest reports; to be called a few times a second."""
        if self._step is None:
            return
        best = best_of_roles(reports)
        self._retry_s = max([MIN_RETRY_S, *(drain_s(report, self._mean_request_s()) for report in best)])
        self._step.observe(max(map(load_of, best), default=None))

    def check(self, priority: int) -> None:
        """RESOURCE_EXHAUSTED for a request of a low class while the step is on."""
        if priority >= self._below or not self.is_on:
            return
        self.on_refused(NAME)
        raise MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
            f"the mesh is overloaded: requests of priority below {self._below} are not taken now",
            field="priority",
            limit=f"priority {self._below}",
            retry_after_s=min(MAX_RETRY_S, self._retry_s),
        )

    def _changed(self, is_on: bool, load: float) -> None:
        log.warning("degraded", step=NAME, on=is_on, load=round(load, 2), retry_after_s=round(self._retry_s, 1))
        self.on_change(is_on)


def best_of_roles(reports: Iterable[LoadReport]) -> list[LoadReport]:
    """The least loaded of each role and model: new requests go there."""
    best: dict[tuple[str, str], LoadReport] = {}
    for report in reports:
        kind = (report.role, report.model_revision)
        if not report.draining and (kind not in best or load_of(report) < load_of(best[kind])):
            best[kind] = report
    return list(best.values())


def load_of(report: LoadReport) -> float:
    """SLO load; none where nothing runs, whatever was measured last."""
    return report.slo_load if busy(report) else 0.0


def drain_s(report: LoadReport, mean_request_s: float) -> float:
    """Predicted seconds until the instance is back at its target; 0 while it is."""
    load = load_of(report)
    if not load > 1.0:
        return 0.0
    waits_s = max(report.predicted_ttft_s, report.measured_ttft_s)
    return (mean_request_s if report.role == "decode" else waits_s) * (1.0 - 1.0 / load)
