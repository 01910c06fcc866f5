"""Sources whose bytes do not arrive here: after a few in a row, routers let nothing come from them for a while. Pure.

A line that is cut between two ranks alone shows nowhere but in their transfers, and each request that is placed there
waits for the whole time of one. Both ends are runs of a cache domain: one that is replaced begins anew.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tidemill_worker.tickets import DomainId

NEVER = float("-inf")


@dataclass(frozen=True)
class Attempt:
    """A transfer that has begun, to a domain of ours."""

    own: DomainId
    source: DomainId
    number: int
    began_at: float


@dataclass
class Record:
    """What is known of one source: misses since its bytes last arrived, and its silence, if they were enough."""

    misses: int = 0
    missed_at: float = NEVER
    silent_until: float = NEVER
    probe: Attempt | None = None
    """The transfer that is to tell whether the silence is over."""

    def is_silent(self, now: float) -> bool:
        return now < self.silent_until or self.probe is not None


class SilentSources:
    """The sources of one instance's domains. `misses` in a row begin `length_s` of silence.

    The first transfer after it is a probe: while it is under way the source stays silent, and it alone ends the silence
    or begins the next. Whatever arrives, also from a source that was tried for want of another, ends it at once.
    """

    def __init__(self, misses: int, length_s: float, memory_s: float, clock: Callable[[], float]) -> None:
        """`memory_s`: how long misses count, and the end of a silence is remembered."""
        self._misses = misses
        self._length_s = length_s
        self._memory_s = memory_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._records: dict[tuple[DomainId, DomainId], Record] = {}
        """By our domain and the source."""

    def begins(self, own: DomainId, source: DomainId) -> Attempt:
        """A transfer begins; `ends` follows, whatever became of it."""
        now = self._clock()
        self._forget(now)
        attempt = Attempt(own, source, next(self._numbers), now)
        record = self._records.get((own, source))
        if record is not None and record.silent_until > NEVER and not record.is_silent(now):
            record.probe = attempt
        return attempt

    def arrived(self, attempt: Attempt) -> None:
        """Its bytes came: nothing is held against the source any more."""
        self._records.pop((attempt.own, attempt.source), None)

    def missed(self, attempt: Attempt) -> bool:
        """Its bytes did not come; whether its source is silent from now on, and was not before."""
        now = self._clock()
        record = self._records.setdefault((attempt.own, attempt.source), Record())
        if attempt.began_at < record.silent_until:
            return False  # It was under way already, or tried for want of another: it says nothing new.
        was_silent = record.is_silent(now)
        record.misses, record.missed_at = record.misses + 1, now
        if record.misses < self._misses:
            return False
        record.silent_until = now + self._length_s
        return not was_silent

    def ends(self, attempt: Attempt) -> None:
        """A probe that neither arrived nor missed, since nobody wanted it any more, leaves that to the next."""
        record = self._records.get((attempt.own, attempt.source))
        if record is not None and record.probe == attempt:
            record.probe = None

    def sources(self, own: DomainId) -> list[DomainId]:
        """Those that are silent now to a domain of ours."""
        return [source for domain, source in self.pairs() if domain == own]

    def pairs(self) -> list[tuple[DomainId, DomainId]]:
        """Our domains and what is silent to them."""
        now = self._clock()
        self._forget(now)
        return [pair for pair, record in self._records.items() if record.is_silent(now)]

    def _forget(self, now: float) -> None:
        for pair, record in list(self._records.items()):
            latest = max(record.missed_at, record.silent_until)
            if record.probe is None and now - latest >= self._memory_s:
                del self._records[pair]
