"""The loop around the decision: observe, decide, check the fence, act, remember why."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from tidemill_autoscaler.actuator import Actuator, ActuatorError
from tidemill_autoscaler.decision import Action, Decision, PoolPlanner
from tidemill_autoscaler.observation import Observation
from tidemill_autoscaler.policy import Bounds
from tidemill_autoscaler.view import PoolView
from tidemill_mesh.metrics import Metrics

log = structlog.get_logger()


class Leadership(Protocol):
    """Whether this process may act, asked right before each act."""

    def is_leader(self) -> bool:
        """True while the lease surely holds."""
        ...


@dataclass
class Pool:
    """One role's planner and what it last saw and decided."""

    role: str
    view: PoolView
    planner: PoolPlanner
    seen: Observation = field(default_factory=Observation)
    # The latest decision that was not to hold, or the reason to hold while there was none.
    last: Decision = field(default_factory=lambda: Decision(Action.HOLD, "nothing decided yet"))
    decided_at: float = 0.0


class Controller:
    """Steps all pools; only the leader acts, the others watch so that they can take over at once."""

    def __init__(
        self,
        pools: list[Pool],
        actuator: Actuator,
        leadership: Leadership,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = {pool.role: pool for pool in pools}
        self.actuator = actuator
        self.counters: dict[str, int] = {}
        self._leadership, self._clock = leadership, clock
        self._actions = metrics.counter("actions_total", "Starts, stops and withdrawals, by outcome.", ("action", "ok"))
        self._load = metrics.gauge("pool_slo_load", "SLO load of a pool.", ("role",))
        self._replicas = metrics.gauge("pool_replicas", "Instances of a pool that serve.", ("role",))

    @property
    def leader(self) -> bool:
        """Whether this process leads."""
        return self._leadership.is_leader()

    def step(self, source_healthy: bool) -> None:
        """One round over all pools."""
        if self.leader:
            self.actuator.tick()
        for pool in self.pools.values():
            now = self._clock()
            pool.seen = pool.view.observe(self.actuator.managed(pool.role), source_healthy)
            decision = pool.planner.step(now, pool.seen)
            self._load.labels(role=pool.role).set(pool.planner.load)
            self._replicas.labels(role=pool.role).set(len(pool.seen.serving))
            self.counters[f"{pool.role}_unexpected_changes"] = pool.planner.manual_changes
            self.counters[f"{pool.role}_failed_starts"] = pool.planner.failed_starts
            self._carry_out(pool, decision, now)

    def set_bounds(self, role: str, bounds: Bounds) -> None:
        """New bounds of a role, in force from the next step."""
        log.info("bounds set", role=role, min_replicas=bounds.min_replicas, max_replicas=bounds.max_replicas)
        self.pools[role].planner.bounds = bounds

    def _carry_out(self, pool: Pool, decision: Decision, now: float) -> None:
        if decision.action is Action.HOLD or not self.leader:
            if decision.reason != pool.last.reason and pool.last.action is Action.HOLD:
                pool.last, pool.decided_at = decision, now
            return
        if decision != pool.last:
            log.info(decision.action.value, role=pool.role, instance=decision.instance, reason=decision.reason)
        pool.last, pool.decided_at = decision, now
        try:
            started = self._act(pool, decision)
        except ActuatorError as error:
            self._count(decision.action, ok=False)
            log.warning("could not be carried out", action=decision.action.value, role=pool.role, error=str(error))
            pool.planner.start_failed(now)
            return
        self._count(decision.action, ok=True)
        pool.planner.done(now, decision, started)
        if decision.action is Action.WITHDRAW and decision.failed:
            pool.planner.start_failed(now)

    def _act(self, pool: Pool, decision: Decision) -> str:
        match decision.action:
            case Action.START:
                return self.actuator.start(pool.role)
            case Action.STOP:
                self.actuator.stop(decision.instance)
            case Action.WITHDRAW:
                self.actuator.withdraw(decision.instance)
        return ""

    def _count(self, action: Action, *, ok: bool) -> None:
        self._actions.labels(action=action.value, ok=str(ok).lower()).inc()
        name = f"{action.value}{'' if ok else '_refused'}_total"
        self.counters[name] = self.counters.get(name, 0) + 1


def role_status(pool: Pool, now: float) -> dict[str, Any]:
    """The fields of a pool's PoolStatus."""
    return {
        "role": pool.role,
        "replicas": len(pool.seen.serving),
        "starting": len(pool.seen.pending),
        "draining": len(pool.seen.workers) - len(pool.seen.serving),
        "min_replicas": pool.planner.bounds.min_replicas,
        "max_replicas": pool.planner.bounds.max_replicas,
        "slo_load": pool.planner.load,
        "last_decision": f"{pool.last.action.value}: {pool.last.reason}",
        "last_decision_age_s": max(0.0, now - pool.decided_at),
        "model": pool.view.model,
    }
