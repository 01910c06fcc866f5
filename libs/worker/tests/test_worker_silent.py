"""Sources whose bytes do not arrive are left alone for a while; one transfer ends that or begins it anew."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.silent_sources import Attempt, SilentSources
from tidemill_worker.tickets import DomainId

LENGTH_S, MEMORY_S = 60.0, 600.0
P, Q = DomainId("p", "i", 0, "e"), DomainId("q", "i", 0, "e")
OWN = DomainId("d", "i", 0, "e")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def sources_of(misses: int = 2) -> tuple[SilentSources, Clock]:
    clock = Clock()
    return SilentSources(misses, LENGTH_S, MEMORY_S, clock), clock


def miss(sources: SilentSources, clock: Clock, source: DomainId = P, seconds: float = 20.0) -> bool:
    """One whole transfer that does not arrive."""
    attempt = sources.begins(OWN, source)
    clock.now_s += seconds
    begins = sources.missed(attempt)
    sources.ends(attempt)
    return begins


def arrive(sources: SilentSources, source: DomainId = P) -> None:
    attempt = sources.begins(OWN, source)
    sources.arrived(attempt)
    sources.ends(attempt)


def test_misses_in_a_row_begin_a_silence_and_one_slow_transfer_among_others_does_not() -> None:
    sources, clock = sources_of()
    for _ in range(5):
        assert not miss(sources, clock)
        arrive(sources)
    assert not miss(sources, clock)
    assert not miss(sources, clock, Q)
    assert miss(sources, clock)
    assert sources.sources(OWN) == [P]


def test_those_that_were_under_way_do_not_prolong_it_and_all_of_them_are_one_silence() -> None:
    sources, clock = sources_of()
    under_way = [sources.begins(OWN, P) for _ in range(6)]
    clock.now_s += 20.0
    assert [sources.missed(attempt) for attempt in under_way[:4]] == [False, True, False, False]
    clock.now_s += LENGTH_S - 1.0
    assert [sources.missed(attempt) for attempt in under_way[4:]] == [False, False]
    clock.now_s += 1.0
    assert sources.sources(OWN) == []


def silenced() -> tuple[SilentSources, Clock]:
    sources, clock = sources_of()
    miss(sources, clock)
    miss(sources, clock)
    return sources, clock


def test_after_it_one_transfer_is_tried_and_the_source_stays_silent_meanwhile() -> None:
    sources, clock = silenced()
    clock.now_s += LENGTH_S
    assert sources.sources(OWN) == []
    probe = sources.begins(OWN, P)
    assert sources.sources(OWN) == [P]
    clock.now_s += 20.0
    assert not sources.missed(probe), "it goes on"
    sources.ends(probe)
    assert sources.sources(OWN) == [P]
    clock.now_s += LENGTH_S
    assert sources.sources(OWN) == []
    probe = sources.begins(OWN, P)
    sources.arrived(probe)
    sources.ends(probe)
    assert sources.sources(OWN) == []
    assert not miss(sources, clock), "nothing is held against it any more"


def test_a_probe_that_nobody_wanted_to_its_end_leaves_it_to_the_next() -> None:
    sources, clock = silenced()
    clock.now_s += LENGTH_S
    sources.ends(sources.begins(OWN, P))
    assert sources.sources(OWN) == []
    sources.begins(OWN, P)
    assert sources.sources(OWN) == [P]


def test_what_arrives_from_a_silent_source_ends_the_silence() -> None:
    sources, _ = silenced()
    arrive(sources)
    assert sources.sources(OWN) == []


def test_a_source_that_was_replaced_begins_anew() -> None:
    sources, _ = silenced()
    assert sources.sources(OWN) == [P]
    assert DomainId("p", "i", 0, "another") not in sources.sources(OWN)


def test_our_domains_hear_a_source_each_for_itself_and_one_that_is_replaced_begins_anew() -> None:
    sources, clock = silenced()
    other = DomainId("d", "i", 1, "e")
    attempt = sources.begins(other, P)
    sources.arrived(attempt)
    sources.ends(attempt)
    assert sources.pairs() == [(OWN, P)]
    assert sources.sources(other) == []
    assert sources.sources(DomainId("d", "i", 0, "another")) == []
    clock.now_s += LENGTH_S + MEMORY_S
    assert sources.pairs() == []


def test_a_miss_within_a_silence_does_not_prolong_it() -> None:
    sources, clock = silenced()
    clock.now_s += 10.0
    assert not miss(sources, clock)
    clock.now_s += LENGTH_S - 30.0
    assert sources.sources(OWN) == []


STEPS = st.tuples(st.sampled_from(["begin", "arrive", "miss", "end"]), st.sampled_from([P, Q]), st.floats(0.0, 50.0))


@given(st.integers(1, 4), st.lists(STEPS, max_size=60))
def test_whatever_comes_none_is_silent_without_misses_and_every_silence_ends_by_itself(
    misses: int, steps: list[tuple[str, DomainId, float]]
) -> None:
    sources, clock = sources_of(misses)
    live: dict[DomainId, list[Attempt]] = {P: [], Q: []}
    in_a_row = {P: 0, Q: 0}
    for what, source, wait_s in steps:
        clock.now_s += wait_s
        if what == "begin":
            live[source].append(sources.begins(OWN, source))
            continue
        if not live[source]:
            continue
        attempt = live[source].pop(0)
        if what == "arrive":
            sources.arrived(attempt)
            in_a_row[source] = 0
        elif what == "miss":
            sources.missed(attempt)
            in_a_row[source] += 1
        sources.ends(attempt)
        for silent in sources.sources(OWN):
            assert in_a_row[silent] >= misses
    for attempt in live[P] + live[Q]:
        sources.ends(attempt)
    clock.now_s += LENGTH_S
    assert sources.sources(OWN) == []
    clock.now_s += MEMORY_S
    assert sources.sources(OWN) == []
    assert sources._records == {}, "nothing is kept of what was long ago"
