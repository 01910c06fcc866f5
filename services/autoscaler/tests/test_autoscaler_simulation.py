"""The decision against a simulated pool: its workers share the load; starts take time, fail or are slow at first."""

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from tidemill_autoscaler.decision import Action, PoolPlanner
from tidemill_autoscaler.observation import Observation, Pending, Worker
from tidemill_autoscaler.policy import Bounds, Policy

POLICY = Policy(
    settle_s=0, window_s=10, scale_in_after_s=40, cooldown_s=20, warmup_s=20, start_timeout_s=30, start_backoff_s=10
)


@dataclass
class SimulatedPool:
    """Each worker carries load 1 per unit of demand; the rest is what the actuator would do."""

    bounds: Bounds
    start_s: float = 5.0
    drain_s: float = 5.0
    room: int = 100
    cold_factor: float = 1.0
    now: float = 0.0
    workers: dict[str, float] = field(default_factory=lambda: {"w0": -1000.0})
    starting: dict[str, float] = field(default_factory=dict)
    draining: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[float, Action]] = field(default_factory=list)
    peak: int = 1
    made: int = 0

    def __post_init__(self) -> None:
        self.planner = PoolPlanner(self.bounds, POLICY)

    def run(self, seconds: float, demand: float, *, healthy: bool = True) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self._advance()
            self._act(self.planner.step(self.now, self._observe(demand, healthy)))
            self.peak = max(self.peak, len(self.workers))

    def _advance(self) -> None:
        for name, began in list(self.starting.items()):
            if self.now - began >= self.start_s and len(self.workers) < self.room:
                self.workers[name] = self.now
                del self.starting[name]
        for name, began in list(self.draining.items()):
            if self.now - began >= self.drain_s:
                del self.draining[name]

    def _observe(self, demand: float, healthy: bool) -> Observation:
        share = demand / max(1, len(self.workers))
        return Observation(
            (
                *(self._worker(name, born, share, healthy) for name, born in self.workers.items()),
                *(Worker(instance=name, age_s=100, draining=True, load_age_s=0.1) for name in self.draining),
            ),
            tuple(Pending(instance=name, age_s=self.now - began) for name, began in self.starting.items()),
            healthy,
        )

    def _worker(self, name: str, born: float, share: float, healthy: bool) -> Worker:
        cold = self.cold_factor if self.now - born < 20 else 1.0
        return Worker(
            instance=name,
            age_s=self.now - born,
            managed=name != "w0",
            idle=share == 0,
            slo_load=share * cold if share else float("nan"),
            load_age_s=0.1 if healthy else 1000.0,
        )

    def _act(self, decision) -> None:
        if decision.action is Action.HOLD:
            return
        self.changes.append((self.now, decision.action))
        started = ""
        if decision.action is Action.START:
            self.made += 1
            started = f"w{self.made}"
            self.starting[started] = self.now
        elif decision.action is Action.STOP:
            del self.workers[decision.instance]
            self.draining[decision.instance] = self.now
        else:
            del self.starting[decision.instance]
        self.planner.done(self.now, decision, started)
        if decision.failed:
            self.planner.start_failed(self.now)


def test_when_traffic_stops_seven_workers_return_to_the_minimum_in_bounded_time():
    pool = SimulatedPool(Bounds(1, 7))
    pool.run(600, demand=6.6)
    assert len(pool.workers) == 7
    pool.run(6 * (POLICY.scale_in_after_s + POLICY.cooldown_s + pool.drain_s), demand=0.0)
    assert len(pool.workers) == 1


def test_slow_first_steps_of_a_new_worker_do_not_overshoot():
    pool = SimulatedPool(Bounds(1, 10), cold_factor=5.0)
    pool.run(300, demand=1.0)
    pool.run(900, demand=1.2)
    assert pool.peak <= 2


def test_an_outage_at_full_load_holds_the_size():
    pool = SimulatedPool(Bounds(1, 4))
    pool.run(400, demand=3.5)
    before = len(pool.workers)
    pool.run(300, demand=3.5, healthy=False)
    assert len(pool.workers) == before == 4


def test_a_scale_out_without_room_does_not_freeze_scale_in():
    pool = SimulatedPool(Bounds(1, 4), room=2)
    pool.run(300, demand=3.5)
    assert len(pool.workers) == 2
    pool.run(200, demand=0.0)
    assert (len(pool.workers), len(pool.starting)) == (1, 0)


def test_a_square_wave_near_the_window_changes_little():
    pool = SimulatedPool(Bounds(1, 4))
    for _ in range(180):
        pool.run(10, demand=1.9)
        pool.run(10, demand=0.1)
    assert len(pool.changes) <= 4


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(
        st.tuples(st.integers(5, 200), st.floats(0, 8, allow_nan=False), st.booleans()), min_size=1, max_size=8
    ),
    low=st.integers(0, 3),
    extra=st.integers(0, 4),
    room=st.integers(1, 6),
)
def test_whatever_the_load_the_size_stays_in_bounds_and_changes_one_at_a_time(phases, low, extra, room):
    pool = SimulatedPool(Bounds(low, low + extra), room=room)
    for seconds, demand, healthy in phases:
        for _ in range(seconds):
            before = len(pool.workers) + len(pool.starting)
            pool.run(1, demand, healthy=healthy)
            after = len(pool.workers) + len(pool.starting)
            assert abs(after - before) <= 1
            assert len(pool.starting) <= 1
            assert after <= max(1, low + extra)
    stops = [at for at, action in pool.changes if action is Action.STOP]
    assert all(later - earlier >= POLICY.cooldown_s for earlier, later in itertools.pairwise(stops))


@settings(max_examples=60, deadline=None)
@given(healthy=st.booleans(), low=st.integers(1, 4))
def test_below_the_minimum_it_is_always_filled_up(healthy, low):
    pool = SimulatedPool(Bounds(low, low))
    pool.run(200, demand=0.5, healthy=healthy)
    assert len(pool.workers) == low
