"""Steps of degraded service go on and off by themselves, and never flap."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_kvcache.degraded import DegradedStep, Marks

MARKS = Marks(on=2.0, off=1.0, on_after_s=2.0, off_after_s=5.0)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.changes: list[tuple[bool, float]] = []
        self.step = DegradedStep("x", MARKS, lambda: self.now_s, lambda on, load: self.changes.append((on, self.now_s)))

    def see(self, load: float | None, seconds: float, every_s: float = 0.5) -> None:
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.step.observe(load)


def test_it_goes_on_after_its_time_above_and_off_after_its_time_below() -> None:
    world = World()
    world.see(3.0, 2.0)
    assert not world.step.is_on
    world.see(3.0, 1.0)
    assert world.step.is_on
    world.see(0.5, 5.0)
    assert world.step.is_on
    world.see(0.5, 1.0)
    assert not world.step.is_on
    assert [on for on, _ in world.changes] == [True, False]
    assert world.step.times_on == 1


@pytest.mark.parametrize("load", [1.0, 1.5, 1.99])
def test_between_the_marks_nothing_changes(load: float) -> None:
    world = World()
    world.see(load, 60.0)
    assert not world.step.is_on
    world.see(2.5, 3.0)
    world.see(load, 60.0)
    assert world.step.is_on


def test_a_peak_or_a_dip_that_does_not_last_changes_nothing() -> None:
    world = World()
    for _ in range(20):
        world.see(9.0, 1.5)
        world.see(1.5, 0.5)
    assert not world.step.is_on
    world.see(9.0, 3.0)
    for _ in range(20):
        world.see(0.1, 4.5)
        world.see(1.5, 0.5)
    assert world.step.is_on


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_who_hears_nothing_serves_as_usual(unknown: float | None) -> None:
    world = World()
    world.see(9.0, 3.0)
    world.see(unknown, 6.0)
    assert not world.step.is_on


LOADS = st.one_of(st.floats(0, 5), st.none(), st.just(math.nan), st.just(math.inf))


@given(st.lists(st.tuples(LOADS, st.floats(0.01, 3.0)), max_size=200))
def test_whatever_the_load_does_changes_lie_apart_and_it_comes_back(moments: list[tuple[float | None, float]]) -> None:
    world = World()
    for load, pause_s in moments:
        world.now_s += pause_s
        world.step.observe(load)
    times = [at_s for _, at_s in world.changes]
    assert [on for on, _ in world.changes] == [i % 2 == 0 for i in range(len(times))]
    for (on, at_s), (_, next_s) in zip(world.changes, world.changes[1:], strict=False):
        assert next_s - at_s >= (MARKS.off_after_s if on else MARKS.on_after_s)
    world.see(0.0, 6.0)
    assert not world.step.is_on
