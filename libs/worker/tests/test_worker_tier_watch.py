"""A tier with copies in and none out raises an alarm; one that nobody has asked, or that gives, does not. Pure."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.tier_watch import Flow, TierAlarm, TierWatch

BLOCKS = 100
WINDOW_S = 3600.0


class Clock:
    """Time that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> TierWatch:
    return TierWatch(BLOCKS, WINDOW_S, clock)


def test_blocks_that_only_go_in_while_prompts_ask_for_some_are_told(clock: Clock, watch: TierWatch) -> None:
    assert watch.look(Flow(taken=BLOCKS, asked=900)) is None
    clock.now = WINDOW_S - 1
    assert watch.look(Flow(taken=250, asked=1200, found=40)) is None
    clock.now = WINDOW_S
    assert watch.look(Flow(taken=250, asked=1200, found=40)) == Flow(taken=250, asked=300, found=40)
    # One block ends it, and everything is counted anew.
    assert watch.look(Flow(taken=260, asked=1210, found=50, given=1)) is None
    clock.now += WINDOW_S
    assert watch.look(Flow(taken=260 + BLOCKS - 1, asked=9999, found=50, given=1)) is None
    assert watch.look(Flow(taken=260 + BLOCKS, asked=9999, found=50, given=1)) is None
    clock.now += WINDOW_S
    again = Flow(taken=260 + BLOCKS, asked=9999 + BLOCKS, found=50, given=1)
    assert watch.look(again) == Flow(taken=BLOCKS, asked=BLOCKS)


@pytest.mark.parametrize(
    ("what", "first", "last"),
    [
        ("nobody asks", Flow(taken=BLOCKS), Flow(taken=9999)),
        ("few are asked for", Flow(taken=BLOCKS), Flow(taken=9999, asked=BLOCKS - 1)),
        ("all was asked for before it had anything", Flow(taken=BLOCKS, asked=9999), Flow(taken=9999, asked=9999)),
        ("little goes in", Flow(taken=BLOCKS - 1), Flow(taken=BLOCKS - 1, asked=9999)),
        ("one comes out", Flow(taken=BLOCKS), Flow(taken=9999, asked=9999, given=1)),
    ],
)
def test_no_alarm_where(clock: Clock, watch: TierWatch, what: str, first: Flow, last: Flow) -> None:
    assert watch.look(first) is None
    clock.now = 10 * WINDOW_S
    assert watch.look(last) is None, what


Step = st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans(), st.integers(0, 2000))


@given(st.lists(Step, max_size=40))
def test_an_alarm_always_has_its_reasons(steps: list[tuple[int, int, bool, int]]) -> None:
    clock = Clock()
    watch = TierWatch(BLOCKS, WINDOW_S, clock)
    taken = asked = given_blocks = 0
    last_given_s = 0.0
    for more_taken, more_asked, gives, seconds in steps:
        clock.now += seconds
        taken, asked, given_blocks = taken + more_taken, asked + more_asked, given_blocks + gives
        last_given_s = clock.now if gives else last_given_s
        alarm = watch.look(Flow(taken, asked, 0, given_blocks))
        if alarm is not None:
            assert clock.now - last_given_s >= WINDOW_S
            assert BLOCKS <= alarm.taken <= taken
            assert BLOCKS <= alarm.asked <= asked


def shown(metrics: Metrics, tier: str) -> str:
    found = re.search(rf'tidemill_prefill_one_way_tier{{tier="{tier}"}} (\S+)', metrics.exposition().decode())
    assert found
    return found[1]


def test_the_metric_follows_and_the_log_tells_once_in_each_window(clock: Clock) -> None:
    metrics = Metrics("prefill", "prefill-1")
    counts = WorkerCounts(metrics)
    alarm = TierAlarm(counts, BLOCKS, WINDOW_S, clock)
    with capture_logs() as lines:
        counts.l2_blocks("saved", BLOCKS)
        counts.l3_blocks("offloaded", BLOCKS)
        alarm.look()
        counts.l2_blocks("asked", BLOCKS)
        counts.l3_blocks("asked", BLOCKS)
        # A prefetched block came out of L3.
        counts.l2_blocks("prefetched", 1)
        # Looked at again and again, for 2 hours and a half.
        for _ in range(900):
            clock.now += 10.0
            alarm.look()
        assert (shown(metrics, "l2"), shown(metrics, "l3")) == ("1.0", "0.0")
        counts.l2_blocks("onboarded", 1)
        alarm.look()
    assert (shown(metrics, "l2"), shown(metrics, "l3")) == ("0.0", "0.0")
    assert lines == 2 * [
        {
            "event": "a tier takes blocks and gives none",
            "log_level": "warning",
            "tier": "l2",
            "taken": BLOCKS,
            "asked": BLOCKS,
            "found": 0,
            "within_s": WINDOW_S,
        }
    ]
