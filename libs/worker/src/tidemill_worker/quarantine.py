"""Instances whose bytes arrive damaged here: after a few, routers let nothing more come from them for a while. Pure.

A checksum finds each damaged transfer, so that none is ever used. It does not find the cause, which is a link, a device
or memory: each further transfer would cost its request another attempt.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Record:
    """What is known of one source."""

    hits: list[float] = field(default_factory=list)
    """When its bytes arrived damaged, within the window."""
    until: float = float("-inf")
    """End of its quarantine."""


class Quarantine:
    """The sources of one instance. `hits` damaged transfers within `window_s` begin `length_s` of quarantine.

    One that shows damage again within `window_s` after its quarantine, or in it, begins another at once.
    """

    def __init__(self, hits: int, window_s: float, length_s: float, clock: Callable[[], float]) -> None:
        self._hits = hits
        self._window_s = window_s
        self._length_s = length_s
        self._clock = clock
        self._records: dict[str, Record] = {}

    def damaged(self, source: str) -> bool:
        """A transfer arrived damaged; whether its source is in quarantine from now on, and was not before."""
        now = self._clock()
        self._forget(now)
        record = self._records.setdefault(source, Record())
        was_in = now < record.until
        record.hits = [hit for hit in record.hits if now - hit < self._window_s] + [now]
        on_probation = now - record.until < self._window_s
        if on_probation or len(record.hits) >= self._hits:
            record.until, record.hits = now + self._length_s, []
            return not was_in
        return False

    def sources(self) -> list[str]:
        """Those in quarantine now, by name."""
        now = self._clock()
        self._forget(now)
        return sorted(source for source, record in self._records.items() if now < record.until)

    def _forget(self, now: float) -> None:
        for source, record in list(self._records.items()):
            latest = max([record.until, *record.hits])
            if now - latest >= self._window_s:
                del self._records[source]
