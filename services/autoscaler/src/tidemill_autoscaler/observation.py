"""What the decision sees of one pool at one moment, and its memory of the load."""

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A registered instance."""

    instance: str
    age_s: float
    draining: bool = False
    # Started by this autoscaler or one before it: it may stop it.
    managed: bool = False
    # Holds no request at all.
    idle: bool = True
    slo_load: float = 0.0
    # The part of it that stays, however little there is to do.
    fixed_load: float = 0.0
    # Seconds since its latest load report arrived; infinite: none yet.
    load_age_s: float = math.inf

    @property
    def load(self) -> float:
        """0 when idle, whatever the report predicts or last measured; infinite when busy and not a number."""
        if self.idle:
            return 0.0
        return self.slo_load if math.isfinite(self.slo_load) else math.inf


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A started process that has not registered yet."""

    instance: str
    age_s: float
    alive: bool = True


@dataclass(frozen=True)
class Observation:
    """One pool now."""

    workers: tuple[Worker, ...] = ()
    pending: tuple[Pending, ...] = ()
    # False while the bus that brings load reports is known to be away.
    source_healthy: bool = True

    @property
    def serving(self) -> tuple[Worker, ...]:
        """Workers that take new requests."""
        return tuple(worker for worker in self.workers if not worker.draining)

    def warming(self, warmup_s: float) -> bool:
        """True while a worker is too young for its load to mean anything."""
        return any(worker.age_s < warmup_s for worker in self.serving)


def pool_load(seen: Observation, warmup_s: float, stale_load_s: float) -> float | None:
    """Mean SLO load of the pool's warm workers with a fresh and finite report; None if nothing is known."""
    if not seen.source_healthy:
        return None
    fresh = [worker for worker in seen.serving if worker.load_age_s <= stale_load_s and worker.age_s >= warmup_s]
    known = [worker.load for worker in fresh if math.isfinite(worker.load)]
    return sum(known) / len(known) if known else None


def all_reported(seen: Observation, stale_load_s: float) -> bool:
    """True if every serving worker has a fresh report: without that nothing is ever taken away."""
    return seen.source_healthy and all(worker.load_age_s <= stale_load_s for worker in seen.serving)


class LoadHistory:
    """Load samples since the pool last changed, as far back as anybody asks."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._samples: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def clear(self) -> None:
        """Forgets all: what was measured before a change says nothing about the pool after it."""
        self._samples.clear()
        self._since = None

    def add(self, now: float, load: float | None) -> None:
        """Adds a sample; an unknown one breaks the series, so that no window spans an outage."""
        if load is None:
            self.clear()
            return
        self._since = now if self._since is None else self._since
        self._samples.append((now, load))
        # One sample older than the horizon stays: it is in force at the horizon.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._keep_s:
            self._samples.popleft()

    def covers(self, now: float, window_s: float) -> bool:
        """True if the series reaches back over the whole window."""
        return self._since is not None and now - self._since >= window_s

    def mean(self, now: float, window_s: float) -> float:
        """Mean over the window; 0 without samples."""
        loads = self._within(now, window_s)
        return sum(loads) / len(loads) if loads else 0.0

    def peak(self, now: float, window_s: float) -> float:
        """Highest sample of the window; 0 without samples."""
        return max(self._within(now, window_s), default=0.0)

    def latest(self) -> float:
        """The last sample; 0 without samples."""
        return self._samples[-1][1] if self._samples else 0.0

    def _within(self, now: float, window_s: float) -> list[float]:
        return [load for time, load in self._samples if time >= now - window_s]
