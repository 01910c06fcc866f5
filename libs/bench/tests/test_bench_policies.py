"""The simulated engine under the policies that the benchmarks compare: each of them is at work."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tidemill_bench.benchmarks import fair, highwater


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each preemption is a line."""
    with capture_logs():
        yield


def test_more_targets_are_met_than_by_first_come_first_served() -> None:
    arrivals = fair.mixed(120, 0.75, 0, short=(800, 8192), long=(32_768, 131_072), cost=fair.COST, chunk=2048)
    plain = fair.Workload(name="load 0.75", description="120 prompts", rounds=[arrivals], settings=fair.SIMULATED)
    workload = fair.with_targets(plain)
    assert {arrival.slo_ttft_s for arrival in workload.rounds[0]} == set(fair.TARGETS_S)
    lives = {policy: fair.simulate(workload, policy) for policy in ("fcfs", "fair")}
    rows = {row.metric: row for row in fair.target_rows(workload, lives, "here")}
    for name in ("share of near targets met", "share of targets met"):
        row = rows[f"{name}, targets, fair"]
        assert row.baseline_value is not None
        assert row.value > row.baseline_value
        assert f"{name}, targets, fair without targets" in rows
    assert fair.over_bound(workload, lives["fair"], fair.COST) <= 1


def test_each_gate_of_admission_keeps_some_out_for_those_who_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highwater, "SLO_TPOT_S", 0.0095)
    crowded = replace(
        highwater.workloads(True)[0], count=60, rate_per_s=100.0, median_output=60, loop_share=0.0, num_blocks=120
    )
    figures = {
        policy: highwater.figures([highwater.measure(crowded, options, 11)])
        for policy, options in highwater.POLICIES.items()
    }
    within = {policy: found[highwater.WITHIN_TARGET][1] for policy, found in figures.items()}
    waits_s = {policy: found["TTFT mean"][1] for policy, found in figures.items()}
    for gate in ("forecast", "tpot"):
        assert waits_s[gate] > waits_s["high water"], "somebody is kept out"
        assert 1 > within[gate] > within["high water"] > 0, "for the sake of those who run"
