"""Load or recompute, and from where: the plan of an onboarding."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.source_plan import LoadPlan, Offer, Rates, plan_load

BLOCK_BYTES = 1000


def offer(
    name: str, has: list[bool], rate: float, latency_s: float = 0.0, snapshots: list[bool] | None = None
) -> Offer:
    return Offer(name, has, snapshots or [False] * len(has), latency_s, rate)


def plan(offers: list[Offer], count: int, *, compute_s: float = 1.0, need_snapshot: bool = False) -> LoadPlan:
    return plan_load(offers, count, block_bytes=BLOCK_BYTES, block_compute_s=compute_s, need_snapshot=need_snapshot)


def test_each_block_comes_from_the_quickest_source_that_has_it() -> None:
    l2 = offer("l2", [True, True, False, False], 1e6)
    peer = offer("peer", [True, True, True, False], 1e5)
    l3 = offer("l3", [True, True, True, True], 1e4)
    made = plan([l3, l2, peer], 4)
    assert made.by_source == {"l2": [0, 1], "peer": [2], "l3": [3]}
    assert made.load_s == 0.1, "sources work at the same time"


def test_a_block_comes_from_who_has_its_snapshot_wherever_a_run_may_end_with_it() -> None:
    l2 = offer("l2", [True, True, True, False], 1e6, snapshots=[False] * 4)
    l3 = offer("l3", [True, True, True, True], 1e4, snapshots=[False, True, False, False])
    assert plan([l2, l3], 4, need_snapshot=True).by_source == {"l2": [0], "l3": [1]}
    assert plan([l2, l3], 4).by_source == {"l2": [0, 1, 2], "l3": [3]}, "others end with any block"


def test_a_quick_source_with_a_long_latency_is_left_alone_where_little_is_wanted() -> None:
    far, near = offer("far", [True] * 8, 1e6, latency_s=0.5), offer("near", [True] * 8, 9e5)
    assert plan([far, near], 8).by_source == {"near": list(range(8))}
    many = [True] * 1000
    made = plan([offer("far", many, 1e6, latency_s=0.5), offer("near", many, 9e5)], 1000)
    assert len(made.by_source["near"]) > len(made.by_source["far"]) > 200, (
        "its latency is over before the other is done"
    )


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.floats(1e2, 1e6), st.floats(0.0, 5.0)), min_size=1, max_size=3),
)
def test_no_other_share_of_the_sources_brings_all_blocks_sooner(count: int, sources: list[tuple[float, float]]) -> None:
    offers = [offer(str(i), [True] * count, rate, latency_s) for i, (rate, latency_s) in enumerate(sources)]
    made = plan(offers, count, compute_s=1e6)
    shares = (share for share in itertools.product(range(count + 1), repeat=len(sources)) if sum(share) == count)
    best_s = min(
        max(
            latency + blocks * BLOCK_BYTES / rate
            for blocks, (rate, latency) in zip(share, sources, strict=True)
            if blocks
        )
        for share in shares
    )
    assert made.num_blocks == count
    assert made.load_s <= best_s * (1 + 1e-9)


def test_what_computes_more_quickly_than_it_loads_is_computed() -> None:
    l3 = offer("l3", [True] * 4, 1e4, latency_s=0.5)
    assert plan([l3], 4, compute_s=0.2).num_blocks == 0
    assert plan([l3], 4, compute_s=0.3).num_blocks == 4
    assert (
        plan_load([l3], 4, block_bytes=BLOCK_BYTES, block_compute_s=0.01, need_snapshot=False, always=True).num_blocks
        == 4
    )


def test_a_slow_tail_is_left_to_compute() -> None:
    made = plan([offer("l2", [True, True, False, False], 1e6), offer("l3", [True] * 4, 500.0)], 4)
    assert made.by_source == {"l2": [0, 1]}


def test_nothing_is_loaded_behind_a_gap() -> None:
    assert plan([offer("l3", [True, False, True], 1e6)], 3).by_source == {"l3": [0]}


def test_a_model_with_state_is_given_runs_that_end_at_a_snapshot() -> None:
    with_snapshot = [False, True, False, True, False]
    l2 = offer("l2", [True] * 3 + [False] * 2, 1e6, snapshots=with_snapshot)
    assert plan([l2], 5, need_snapshot=True).by_source == {"l2": [0, 1]}
    l3 = offer("l3", [True] * 5, 1e5, snapshots=with_snapshot)
    assert plan([l2, l3], 5, need_snapshot=True).by_source == {"l2": [0, 1, 2], "l3": [3]}
    assert plan([offer("l3", [True] * 5, 1e5)], 5, need_snapshot=True).num_blocks == 0


@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    st.lists(st.floats(1e2, 1e6), min_size=3, max_size=3),
    st.lists(st.floats(0.0, 0.5), min_size=3, max_size=3),
    st.floats(0.001, 1.0),
)
def test_no_shorter_run_of_the_same_choices_saves_more(
    has: list[list[bool]], rates: list[float], latencies_s: list[float], compute_s: float
) -> None:
    offers = [offer(str(i), flags, rates[i], latencies_s[i]) for i, flags in enumerate(has)]
    made = plan(offers, 6, compute_s=compute_s)
    saved = made.num_blocks * compute_s - made.load_s if made.num_blocks else 0.0
    everywhere = [any(flags) for flags in zip(*has, strict=True)]
    run = len(list(itertools.takewhile(bool, everywhere)))
    arrival_s = dict(enumerate(latencies_s))
    used: set[int] = set()
    for length in range(1, run + 1):
        holders = [i for i, flags in enumerate(has) if flags[length - 1]]
        first = min(holders, key=lambda i: arrival_s[i] + BLOCK_BYTES / rates[i])
        arrival_s[first] += BLOCK_BYTES / rates[first]
        used.add(first)
        load_s = max(arrival_s[i] for i in used)
        assert length * compute_s - load_s <= saved + 1e-9


def step_by_step(
    offers: list[Offer], count: int, compute_s: float, need_snapshot: bool
) -> tuple[int, list[str], float]:
    """Length, sources and seconds of the best run, one block after the other."""
    arrival_s = {each.name: each.latency_s for each in offers}
    chosen: list[str] = []
    best, best_saved, best_load_s, load_s = 0, 0.0, 0.0, 0.0
    for index in range(count):
        holders = [each for each in offers if each.has[index]]
        if not holders:
            break
        first = min(holders, key=lambda each: arrival_s[each.name] + BLOCK_BYTES / each.bytes_per_s)
        arrival_s[first.name] += BLOCK_BYTES / first.bytes_per_s
        load_s = max(load_s, arrival_s[first.name])
        chosen.append(first.name)
        saved = len(chosen) * compute_s - load_s
        if (first.has_snapshot[index] or not need_snapshot) and saved > best_saved:
            best, best_saved, best_load_s = len(chosen), saved, load_s
    return best, chosen[:best], best_load_s


# Of sums without rounding, whose order is then of no account.
seconds = st.integers(0, 64).map(lambda n: n / 1024)
flag_runs = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(flag_runs, seconds, st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=120, max_size=120),
    seconds.filter(bool),
    st.booleans(),
)
def test_long_prompts_are_planned_as_block_by_block(
    sources: list[tuple[list[tuple[bool, int]], float, int]], snapshots: list[bool], compute_s: float, need: bool
) -> None:
    offers = []
    for number, (runs, latency_s, blocks_per_s) in enumerate(sources):
        has = [flag for flag, length in runs * 120 for _ in range(length)]
        rate = BLOCK_BYTES * 2.0**blocks_per_s
        offers.append(offer(str(number), has[:120], rate, latency_s, snapshots))
    made = plan(offers, 120, compute_s=compute_s, need_snapshot=need)
    best, chosen, load_s = step_by_step(offers, 120, compute_s, need)
    assert (made.num_blocks, made.load_s) == (best, load_s)
    assert made.by_source == {name: [i for i, one in enumerate(chosen) if one == name] for name in set(chosen)}


def test_a_slow_source_is_avoided_for_a_while_and_then_tried_again() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    assert rates.bytes_per_s("l3", 1e6) == 1e6
    rates.measured("l3", 1 << 20, 1.0)
    assert rates.bytes_per_s("l3", 1e6) == 1 << 20
    rates.late("l3", 1 << 20, 2.0)
    assert rates.bytes_per_s("l3", 1e6) == 1 << 18
    rates.measured("l3", 10, 1.0)
    assert rates.bytes_per_s("l3", 1e6) == 1 << 18, "too small to tell anything"
    now[0] = 40.0
    assert rates.bytes_per_s("l3", 1e6) == 1e6
