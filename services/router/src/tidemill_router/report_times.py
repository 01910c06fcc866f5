"""How old the content of a load report is: workers repeat their latest sample, and a sample is made by a step.

A sample tells of what had arrived when its step began, which is about when the sample before it came. What it tells of
the domain's speed is as old as its last work.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.domain_track import Holder, holder_of
from tidemill_mesh.load import busy

LONGEST_STEP_S = 2.0
"""A longer pause between samples was idleness, not a step."""

NEVER = float("-inf")


@dataclass(slots=True)
class _Seen:
    content: bytes
    changed_at_s: float
    known_until_s: float
    work: tuple[str, int, int]
    """Epoch, and cumulative tokens in it."""
    worked_at_s: float


class ReportTimes:
    """When each target's load last changed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._seen: dict[Holder, _Seen] = {}
        self._clock = clock

    def on_report(self, report: LoadReport) -> None:
        """A report arrived now."""
        content = LoadReport()
        content.CopyFrom(report)
        content.ClearField("sequence")
        content.ClearField("sent_unix_ms")
        packed, now = content.SerializeToString(deterministic=True), self._clock()
        before = self._seen.get(holder_of(report.domain))
        if before is not None and before.content == packed:
            return
        previous = before.changed_at_s if before is not None else NEVER
        work = (report.domain.epoch, report.prompt_tokens_total, report.output_tokens_total)
        # An idle domain's report changes too: its percentiles expire.
        is_idle = not busy(report) and before is not None and before.work == work
        worked_at_s = before.worked_at_s if is_idle and before is not None else now
        known_until_s = max(previous, now - LONGEST_STEP_S)
        self._seen[holder_of(report.domain)] = _Seen(packed, now, known_until_s, work, worked_at_s)

    def changed_at(self, holder: Holder) -> float:
        """When the present content first arrived; minus infinity without any."""
        seen = self._seen.get(holder)
        return seen.changed_at_s if seen else NEVER

    def worked_at(self, holder: Holder) -> float:
        """When a report last told of work; minus infinity without any report."""
        seen = self._seen.get(holder)
        return seen.worked_at_s if seen else NEVER

    def known_until(self, holder: Holder) -> float:
        """Requests placed before this moment are in the present content."""
        seen = self._seen.get(holder)
        return seen.known_until_s if seen else NEVER

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        for holder in [h for h in self._seen if h[0] == instance]:
            del self._seen[holder]
