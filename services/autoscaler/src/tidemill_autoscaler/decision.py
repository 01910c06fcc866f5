"""Start one, stop one or hold: the whole decision of one pool, pure, with the time handed in.

In this order, the first that applies:
  just begun                  only watch
  failed or overdue start     withdraw it, wait before the next one        (also in an outage)
  below the minimum           start one                                    (also in an outage)
  nothing known of the load   hold, never take away
  above the maximum           withdraw a start or stop one of our own
  load high                   start one, if nothing is starting, warming up or cooling down
  load low                    withdraw a start, or stop one of our own if the rest would carry its share
"""

from dataclasses import dataclass
from enum import Enum

from tidemill_autoscaler.observation import LoadHistory, Observation, Pending, Worker, all_reported, pool_load
from tidemill_autoscaler.policy import Bounds, Policy


class Action(Enum):
    """What to do with a pool."""

    HOLD = "hold"
    START = "start"
    # Drain a serving instance.
    STOP = "stop"
    # Give up a start that has not registered.
    WITHDRAW = "withdraw"


@dataclass(frozen=True)
class Decision:
    """An action with its reason, for people and for status."""

    action: Action
    reason: str
    instance: str = ""
    # Withdrawn because it did not come up: the next start waits.
    failed: bool = False


class PoolPlanner:
    """Decides for one pool, one instance at a time."""

    def __init__(self, bounds: Bounds, policy: Policy) -> None:
        self.bounds = bounds
        self.policy = policy
        self.manual_changes = 0
        self.failed_starts = 0
        self._history = LoadHistory(max(policy.window_s, policy.scale_in_after_s))
        self._began: float | None = None
        self._expected: frozenset[str] | None = None
        self._ours: set[str] = set()
        self._cool_until = 0.0
        self._start_allowed = 0.0
        self._failures_in_a_row = 0

    @property
    def load(self) -> float:
        """The pool's latest known SLO load."""
        return self._history.latest()

    def step(self, now: float, seen: Observation) -> Decision:
        """Takes in an observation and decides. The caller reports with `done` what it carried out."""
        self._began = now if self._began is None else self._began
        self._notice_changes(now, seen)
        self._history.add(now, pool_load(seen, self.policy.warmup_s, self.policy.stale_load_s))
        if now - self._began < self.policy.settle_s:
            return Decision(Action.HOLD, f"watching for the first {self.policy.settle_s:g} s")
        return self._decide(now, seen)

    def done(self, now: float, decision: Decision, instance: str = "") -> None:
        """The decision was carried out (instance: the one that was started)."""
        self._ours.add(instance or decision.instance)
        if decision.action is Action.WITHDRAW:
            return
        self._cool_until = now + self.policy.cooldown_s
        self._history.clear()

    def start_failed(self, now: float) -> None:
        """A start did not lead to a registered instance: the next one waits, twice as long each time."""
        self.failed_starts += 1
        wait_s = min(self.policy.max_backoff_s, self.policy.start_backoff_s * 2**self._failures_in_a_row)
        self._failures_in_a_row += 1
        self._start_allowed = now + wait_s

    def _notice_changes(self, now: float, seen: Observation) -> None:
        """A changed set of serving instances: loads measured before say nothing; others' changes are counted."""
        present = frozenset(worker.instance for worker in seen.serving)
        self._ours |= {start.instance for start in seen.pending}
        if self._expected is not None and present != self._expected:
            changed = present ^ self._expected
            self.manual_changes += len(changed - self._ours)
            if present - self._expected:
                self._failures_in_a_row = 0
            self._cool_until = max(self._cool_until, now + self.policy.cooldown_s)
            self._history.clear()
            self._ours -= changed
        self._expected = present

    def _decide(self, now: float, seen: Observation) -> Decision:
        for rule in (self._failed_start, self._floor, self._unknown, self._ceiling, self._high, self._low):
            decision = rule(now, seen)
            if decision is not None:
                return decision
        return Decision(Action.HOLD, f"load {self.load:.2f} is within bounds")

    def _failed_start(self, now: float, seen: Observation) -> Decision | None:
        for start in seen.pending:
            if not start.alive:
                return Decision(Action.WITHDRAW, f"{start.instance} ended before it registered", start.instance, True)
            if start.age_s > self.policy.start_timeout_s:
                reason = f"{start.instance} has not registered within {self.policy.start_timeout_s:g} s"
                return Decision(Action.WITHDRAW, reason, start.instance, True)
        return None

    def _floor(self, now: float, seen: Observation) -> Decision | None:
        have = len(seen.serving) + len(seen.pending)
        if have >= self.bounds.min_replicas:
            return None
        if seen.pending:
            return Decision(Action.HOLD, "below the minimum, one is starting")
        if now < self._start_allowed:
            return Decision(Action.HOLD, f"below the minimum, next start in {self._start_allowed - now:.0f} s")
        return Decision(Action.START, f"{have} replicas, below the minimum of {self.bounds.min_replicas}")

    def _unknown(self, now: float, seen: Observation) -> Decision | None:
        if not seen.source_healthy:
            return Decision(Action.HOLD, "no load reports: the bus is away")
        if seen.serving and pool_load(seen, 0.0, self.policy.stale_load_s) is None:
            return Decision(Action.HOLD, "no fresh load reports")
        return None

    def _ceiling(self, now: float, seen: Observation) -> Decision | None:
        have = len(seen.serving) + len(seen.pending)
        if have <= self.bounds.max_replicas:
            return None
        reason = f"{have} replicas, above the maximum of {self.bounds.max_replicas}"
        if seen.pending:
            return withdraw(seen.pending, reason)
        return self._stop_one(now, seen, reason)

    def _high(self, now: float, seen: Observation) -> Decision | None:
        window_s, limit = self.policy.window_s, self.policy.scale_out_load
        load = self._history.mean(now, window_s)
        if not self._history.covers(now, window_s) or min(load, self.load) <= limit:
            return None
        reason = f"load {load:.2f} over {window_s:g} s is above {limit:g}"
        if len(seen.serving) + len(seen.pending) >= self.bounds.max_replicas:
            return Decision(Action.HOLD, f"{reason}, at the maximum of {self.bounds.max_replicas}")
        if seen.pending:
            return Decision(Action.HOLD, f"{reason}, one is starting")
        if seen.warming(self.policy.warmup_s):
            return Decision(Action.HOLD, f"{reason}, one is warming up")
        wait_s = max(self._cool_until, self._start_allowed) - now
        if wait_s > 0:
            return Decision(Action.HOLD, f"{reason}, next change in {wait_s:.0f} s")
        return Decision(Action.START, reason)

    def _low(self, now: float, seen: Observation) -> Decision | None:
        after_s, limit, serving = self.policy.scale_in_after_s, self.policy.scale_in_load, len(seen.serving)
        if not all_reported(seen, self.policy.stale_load_s):
            return None
        if seen.pending and serving >= self.bounds.min_replicas and self.load < limit:
            return withdraw(seen.pending, f"load {self.load:.2f} is below {limit:g} again")
        if serving <= max(1, self.bounds.min_replicas) or not self._history.covers(now, after_s):
            return None
        projected = with_one_less(self._history.peak(now, after_s), seen.serving)
        if projected >= limit:
            return None
        return self._stop_one(now, seen, f"{serving - 1} would have had at most load {projected:.2f} for {after_s:g} s")

    def _stop_one(self, now: float, seen: Observation, reason: str) -> Decision:
        if any(worker.draining for worker in seen.workers):
            return Decision(Action.HOLD, f"{reason}, one is draining")
        if now < self._cool_until:
            return Decision(Action.HOLD, f"{reason}, next change in {self._cool_until - now:.0f} s")
        ours = [worker for worker in seen.serving if worker.managed]
        if not ours:
            return Decision(Action.HOLD, f"{reason}, but all were started by hand")
        return Decision(Action.STOP, reason, victim(ours).instance)


def with_one_less(load: float, serving: tuple[Worker, ...]) -> float:
    """The load that the others would have had: what is not fixed is shared by one less."""
    fixed = min(load, min(worker.fixed_load for worker in serving))
    return fixed + (load - fixed) * len(serving) / (len(serving) - 1)


def victim(workers: list[Worker]) -> Worker:
    """The one with the least to lose: the least loaded, of those the youngest (its cache is the smallest)."""
    return min(workers, key=lambda worker: (worker.load, worker.age_s, worker.instance))


def withdraw(pending: tuple[Pending, ...], reason: str) -> Decision:
    """Gives up the latest start."""
    return Decision(Action.WITHDRAW, reason, min(pending, key=lambda start: start.age_s).instance)
