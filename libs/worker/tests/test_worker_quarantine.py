"""Sources whose bytes arrive damaged are named for a while, and no others."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.quarantine import Quarantine

WINDOW_S, LENGTH_S = 100.0, 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_nth_hit_within_the_window_begins_a_quarantine_that_ends() -> None:
    clock = Clock()
    sources = Quarantine(3, WINDOW_S, LENGTH_S, clock)
    assert not sources.damaged("p-1")
    clock.now_s += 60.0
    assert not sources.damaged("p-1")
    clock.now_s += 60.0
    assert not sources.damaged("p-1"), "the first is too old to count"
    assert not sources.damaged("p-2")
    assert sources.sources() == []
    clock.now_s += 1.0
    assert sources.damaged("p-1")
    assert sources.sources() == ["p-1"]
    clock.now_s += LENGTH_S
    assert sources.sources() == []


def test_one_more_hit_on_probation_begins_the_next_and_none_forgets() -> None:
    clock = Clock()
    sources = Quarantine(2, WINDOW_S, LENGTH_S, clock)
    sources.damaged("p")
    assert sources.damaged("p")
    assert not sources.damaged("p"), "one that was under way prolongs it"
    clock.now_s += LENGTH_S + 1.0
    assert sources.damaged("p")
    clock.now_s += LENGTH_S + WINDOW_S
    assert not sources.damaged("p")


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0.0, 80.0), st.sampled_from("abc")), max_size=40),
)
def test_whatever_comes_each_source_is_judged_by_its_own_hits(hits: int, events: list[tuple[float, str]]) -> None:
    clock = Clock()
    sources = Quarantine(hits, WINDOW_S, LENGTH_S, clock)
    seen: dict[str, list[float]] = defaultdict(list)
    until: dict[str, float] = {}
    for wait_s, name in events:
        clock.now_s += wait_s
        now = clock.now_s
        recent = [at for at in seen[name] if now - at < WINDOW_S]
        again = now - until.get(name, float("-inf")) < WINDOW_S
        begins = sources.damaged(name)
        was_in = now < until.get(name, float("-inf"))
        if again or len(recent) + 1 >= hits:
            assert begins != was_in
            until[name], seen[name] = now + LENGTH_S, []
        else:
            assert not begins
            seen[name] = [*recent, now]
        assert sources.sources() == sorted(source for source, end in until.items() if now < end)
    clock.now_s += LENGTH_S + WINDOW_S
    assert sources.sources() == []
    assert sources._records == {}, "nothing is kept of what was long ago"
