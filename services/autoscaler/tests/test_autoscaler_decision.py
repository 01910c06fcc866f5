"""The decision of one pool, without processes and without a clock."""

import math

import pytest

from tidemill_autoscaler.decision import Action, Decision, PoolPlanner, with_one_less
from tidemill_autoscaler.observation import Observation, Pending, Worker
from tidemill_autoscaler.policy import Bounds, Policy

POLICY = Policy(
    settle_s=0, window_s=10, scale_in_after_s=30, cooldown_s=20, warmup_s=10, start_timeout_s=60, start_backoff_s=15
)


def worker(name: str, load: float = 0.5, **changes: object) -> Worker:
    values = {"age_s": 1000.0, "idle": False, "slo_load": load, "load_age_s": 0.1, "managed": True, **changes}
    return Worker(instance=name, **values)  # type: ignore[arg-type]


def pool(*workers: Worker, pending: tuple[Pending, ...] = (), healthy: bool = True) -> Observation:
    return Observation(workers, pending, healthy)


def steps(planner: PoolPlanner, seen: Observation, start: float, seconds: float) -> list[Decision]:
    """One step a second with the same observation; nothing is carried out."""
    return [planner.step(start + i, seen) for i in range(int(seconds) + 1)]


def first(decisions: list[Decision]) -> tuple[int, Decision]:
    return next((i, d) for i, d in enumerate(decisions) if d.action is not Action.HOLD)


def actions(decisions: list[Decision]) -> set[Action]:
    return {decision.action for decision in decisions}


def test_right_after_its_start_it_only_watches():
    planner = PoolPlanner(Bounds(1, 3), Policy(settle_s=10))
    second, decision = first(steps(planner, pool(), 0, 30))
    assert (second, decision.action) == (10, Action.START)


def test_high_load_starts_one_only_after_the_whole_window():
    second, decision = first(steps(PoolPlanner(Bounds(1, 3), POLICY), pool(worker("a", 1.5)), 0, 30))
    assert decision.action is Action.START
    assert second == POLICY.window_s


def test_a_burst_that_is_over_starts_nothing():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    steps(planner, pool(worker("a", 20.0)), 0, 9)
    assert actions(steps(planner, pool(worker("a", 0.8)), 10, 3)) == {Action.HOLD}


def test_at_the_maximum_high_load_holds_and_says_so():
    decisions = steps(PoolPlanner(Bounds(1, 1), POLICY), pool(worker("a", 3.0)), 0, 60)
    assert actions(decisions) == {Action.HOLD}
    assert "at the maximum" in decisions[-1].reason


def test_only_one_is_started_at_a_time():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    starting = (Pending(instance="b", age_s=5),)
    assert actions(steps(planner, pool(worker("a", 3.0), pending=starting), 0, 50)) == {Action.HOLD}


def test_low_load_stops_the_youngest_of_our_own_when_the_rest_can_carry_it():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    seen = pool(worker("old", 0.1), worker("hand", 0.1, managed=False, age_s=50), worker("young", 0.1, age_s=100))
    second, decision = first(steps(planner, seen, 0, 60))
    assert (decision.action, decision.instance) == (Action.STOP, "young")
    assert second == POLICY.scale_in_after_s


def test_load_that_the_rest_could_not_carry_is_no_reason_to_stop_one():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    assert actions(steps(planner, pool(worker("a", 0.4), worker("b", 0.4)), 0, 200)) == {Action.HOLD}


def test_instances_started_by_hand_are_never_stopped():
    planner = PoolPlanner(Bounds(1, 1), POLICY)
    seen = pool(worker("a", 0.0, managed=False), worker("b", 0.0, managed=False))
    decisions = steps(planner, seen, 0, 100)
    assert actions(decisions) == {Action.HOLD}
    assert "by hand" in decisions[-1].reason


def test_idle_workers_count_as_no_load_even_when_their_reports_are_not_numbers():
    planner = PoolPlanner(Bounds(1, 7), POLICY)
    idle = [worker(f"w{i}", math.nan, idle=True) for i in range(7)]
    _, decision = first(steps(planner, pool(*idle), 0, 60))
    assert decision.action is Action.STOP


def test_busy_workers_without_a_number_hold_the_size():
    planner = PoolPlanner(Bounds(1, 7), POLICY)
    busy = [worker(f"w{i}", math.nan) for i in range(3)]
    assert actions(steps(planner, pool(*busy), 0, 300)) == {Action.HOLD}


@pytest.mark.parametrize("changes", [{"load_age_s": 60.0}, {"load_age_s": math.inf}])
def test_without_fresh_reports_the_size_is_held(changes: dict[str, float]):
    planner = PoolPlanner(Bounds(1, 7), POLICY)
    stale = [worker(f"w{i}", 0.0, idle=True, **changes) for i in range(5)]
    decisions = steps(planner, pool(*stale), 0, 300)
    assert actions(decisions) == {Action.HOLD}
    assert "no fresh load reports" in decisions[-1].reason


def test_one_silent_worker_is_enough_to_take_nothing_away():
    planner = PoolPlanner(Bounds(1, 7), POLICY)
    seen = pool(worker("a", 0.0, idle=True), worker("b", 0.0, idle=True, load_age_s=60))
    assert actions(steps(planner, seen, 0, 300)) == {Action.HOLD}


def test_an_outage_of_the_bus_never_takes_away_and_still_lifts_to_the_floor():
    planner = PoolPlanner(Bounds(2, 5), POLICY)
    three = [worker(f"w{i}", 0.0, idle=True) for i in range(3)]
    assert actions(steps(planner, pool(*three, healthy=False), 0, 300)) == {Action.HOLD}
    decision = planner.step(301, pool(worker("w0"), healthy=False))
    assert decision.action is Action.START
    assert "below the minimum" in decision.reason


def test_what_was_measured_before_an_outage_does_not_count_after_it():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    high = pool(worker("a", 2.0))
    steps(planner, high, 0, 9)
    planner.step(10, pool(worker("a", 2.0), healthy=False))
    second, _ = first(steps(planner, high, 11, 30))
    assert second == POLICY.window_s


def test_a_start_that_ends_or_never_registers_is_withdrawn():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    overdue = planner.step(0, pool(worker("a"), pending=(Pending(instance="b", age_s=61),)))
    dead = planner.step(1, pool(worker("a"), pending=(Pending(instance="c", age_s=2, alive=False),)))
    assert [(d.action, d.instance, d.failed) for d in (overdue, dead)] == [
        (Action.WITHDRAW, "b", True),
        (Action.WITHDRAW, "c", True),
    ]


def test_failed_starts_wait_twice_as_long_each_time():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    empty = pool()
    assert planner.step(0, empty).action is Action.START
    planner.start_failed(0)
    assert first(steps(planner, empty, 1, 100))[0] == 14
    planner.start_failed(100)
    assert first(steps(planner, empty, 101, 100))[0] == 29
    assert planner.failed_starts == 2


def test_a_start_that_can_never_succeed_is_withdrawn_when_the_load_is_gone():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    stuck = (Pending(instance="b", age_s=30),)
    decision = planner.step(0, pool(worker("a", 0.0, idle=True), pending=stuck))
    assert (decision.action, decision.instance, decision.failed) == (Action.WITHDRAW, "b", False)


def test_a_new_workers_first_loads_are_left_out():
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    cold = worker("b", 50.0, age_s=3)
    assert actions(steps(planner, pool(worker("a", 0.5), cold), 0, 60)) == {Action.HOLD}


def test_while_one_warms_up_no_other_is_started():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    decisions = steps(planner, pool(worker("a", 2.0), worker("b", 9.0, age_s=3)), 0, 60)
    assert actions(decisions) == {Action.HOLD}
    assert "warming up" in decisions[-1].reason


def test_changes_by_others_are_counted_and_ours_are_not():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    planner.step(0, pool(worker("a")))
    planner.step(1, pool(worker("a"), worker("by-hand", managed=False)))
    assert planner.manual_changes == 1
    planner.done(2, Decision(Action.START, ""), "ours")
    planner.step(3, pool(worker("a"), worker("by-hand", managed=False), worker("ours")))
    assert planner.manual_changes == 1
    planner.done(4, Decision(Action.STOP, "", "ours"))
    planner.step(5, pool(worker("a"), worker("by-hand", managed=False), worker("ours", draining=True)))
    assert planner.manual_changes == 1
    planner.step(6, pool(worker("a")))
    assert planner.manual_changes == 2


def test_a_change_starts_the_cooldown_and_forgets_the_load_before_it():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    steps(planner, pool(worker("a", 3.0)), 0, 9)
    planner.done(10, Decision(Action.START, ""), "b")
    second, decision = first(steps(planner, pool(worker("a", 3.0), worker("b", 3.0)), 11, 60))
    assert decision.action is Action.START
    assert second == POLICY.cooldown_s


def test_while_one_drains_no_other_is_stopped():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    seen = pool(worker("a", 0.0, idle=True), worker("b", 0.0, idle=True), worker("c", draining=True))
    decisions = steps(planner, seen, 0, 200)
    assert actions(decisions) == {Action.HOLD}
    assert "draining" in decisions[-1].reason


def test_a_drain_that_takes_long_does_not_keep_a_new_one_from_starting():
    planner = PoolPlanner(Bounds(1, 5), POLICY)
    _, decision = first(steps(planner, pool(worker("a", 3.0), worker("c", draining=True)), 0, 60))
    assert decision.action is Action.START


def test_above_the_maximum_our_own_leave_one_after_the_other():
    planner = PoolPlanner(Bounds(1, 1), POLICY)
    _, decision = first(steps(planner, pool(worker("a", 0.9, managed=False), worker("b", 0.9)), 0, 60))
    assert (decision.action, decision.instance) == (Action.STOP, "b")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cooldown_s": 5, "window_s": 10}, "cooldown_s"),
        ({"scale_in_after_s": 5, "window_s": 10}, "scale_in_after_s"),
        ({"scale_in_load": 1.0}, "scale_in_load"),
    ],
)
def test_a_policy_that_would_flap_is_refused_by_name(changes: dict[str, float], name: str):
    assert Policy(**changes).problem()[0] == name


def test_a_fixed_part_of_the_load_is_not_shared_out_when_one_leaves():
    # Steps of 50 ms, 40 of them for the step itself, against a target of 100 ms: one fewer makes them 60 ms long.
    assert with_one_less(0.5, (worker("a", fixed_load=0.4), worker("b", fixed_load=0.4))) == pytest.approx(0.6)
    assert with_one_less(0.5, (worker("a"), worker("b"))) == pytest.approx(1.0)
    planner = PoolPlanner(Bounds(1, 3), POLICY)
    busy = pool(worker("a", 0.45, fixed_load=0.4), worker("b", 0.45, fixed_load=0.4))
    _, decision = first(steps(planner, busy, 0, 60))
    assert decision.action is Action.STOP
    assert actions(steps(PoolPlanner(Bounds(1, 3), POLICY), pool(worker("a", 0.45), worker("b", 0.45)), 0, 60)) == {
        Action.HOLD
    }
