"""How old the content of a load report is: workers repeat their latest sample, and a sample is made by a step.

A sample tells of what had arrived when its step began, which is about when the sample before it came.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.domain_track import Holder, holder_of

LONGEST_STEP_S = 2.0
"""A longer pause between samples was idleness, not a step."""

NEVER = float("-inf")


@dataclass(slots=True)
class _Seen:
    content: bytes
    changed_at_s: float
    known_until_s: float


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
        self._seen[holder_of(report.domain)] = _Seen(packed, now, max(previous, now - LONGEST_STEP_S))

    def changed_at(self, holder: Holder) -> float:
        """When the present content first arrived; minus infinity without any."""
        seen = self._seen.get(holder)
        return seen.changed_at_s if seen else NEVER

    def known_until(self, holder: Holder) -> float:
        """Requests placed before this moment are in the present content."""
        seen = self._seen.get(holder)
        return seen.known_until_s if seen else NEVER

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        for holder in [h for h in self._seen if h[0] == instance]:
            del self._seen[holder]
