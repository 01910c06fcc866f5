"""Routing quality: public traces through the product's router and caches with simulated engines, and Dynamo's replay.

Eight engines of 4,096 blocks of 512 tokens; step times of Dynamo's mocker. They do both stages; for the highest
rate within targets a fleet of prefill and decode engines is searched too. The caches are first held to an oracle of
exact LRU hits, line by line, where the folder of traces has one. Runs are deterministic.
"""

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidemill_bench.options import Options
from tidemill_bench.peers import dynamo_replay
from tidemill_bench.report import Row, machine
from tidemill_bench.simulation.agent_sessions import read_agent_sessions
from tidemill_bench.simulation.capacity import Targets, highest_speed
from tidemill_bench.simulation.index_feed import BusFaults
from tidemill_bench.simulation.one_pool import hit_blocks, read_oracle
from tidemill_bench.simulation.outcome import Outcome
from tidemill_bench.simulation.replay import (
    FleetShape,
    MakePlacement,
    dynamo_formula,
    load_only,
    replay,
    replay_within,
    round_robin,
    tidemill,
)
from tidemill_bench.simulation.tiers import TierShape
from tidemill_bench.simulation.trace import TraceRequest, read_mooncake

TRACES = ("conversation", "synthetic")
PLACEMENTS = {"round robin": round_robin, "load only": load_only, "Dynamo's formula": dynamo_formula}
HIT_GOALS = {"conversation": 0.33, "synthetic": 0.63}
FAULTS = {
    "events 100 ms late": BusFaults(delay_s=0.1),
    "events 1000 ms late": BusFaults(delay_s=1.0),
    "1 % of the events lost": BusFaults(loss=0.01),
    "events 100 ms late and 1 % of them lost": BusFaults(delay_s=0.1, loss=0.01),
    "events 1000 ms late and 1 % of them lost": BusFaults(delay_s=1.0, loss=0.01),
}
PARTS = ("", "faults")
"""Runs are deterministic, so rows of a late and lossy bus may be added to those of a whole run: the row without faults
that comes with them must be the same to the last digit."""
TIERS = TierShape(l2_blocks=8192, l3_blocks=131_072, peer_fetch=True)
TIERS_TEXT = (
    "L2 8,192 blocks an engine at 25 GB/s, other engines' memory at 50 GB/s, L3 131,072 blocks at 10 GB/s an engine,"
    " 70,272 bytes a token"
)
CAPACITY_REQUESTS, WARM_UP_REQUESTS = 4000, 1000
CAPACITY_FLEETS = {
    "5 prefill and 3 decode engines": FleetShape(prefill_engines=5),
    "8 engines of both stages": FleetShape(),
}
FIRST_SPEED, SPEED_STEP, SPEED_WITHIN = 6.0, 1.25, 0.04
QUICK_REQUESTS = 400
ORACLE_POOLS = (1000, 10_000, 50_000)
DYNAMO_ROUNDS = 3
AGENT_L1_BLOCKS = (512, 1536, 4096)
BETTER = "better than Dynamo's KV mode"

Peer = dict[str, float] | None
"""Figures of Dynamo's replay; None: not measured."""


@dataclass(frozen=True)
class Workload:
    """A trace that is ready to be replayed."""

    text: str
    requests: Sequence[TraceRequest]
    hashes: Sequence[Sequence[bytes]]

    def run(self, shape: FleetShape, placement: MakePlacement = tidemill, *, speed: float = 1.0) -> Outcome:
        """One replay."""
        return replay(self.requests, self.hashes, shape, placement, speed=speed)

    def head(self, count: int) -> "Workload":
        """Its first requests."""
        return replace(self, requests=self.requests[:count], text=f"{self.text}, first {count:,} requests")

    def row(self, metric: str, unit: str, value: float, *, higher: bool, more: str = "", **rest: Any) -> Row:
        """A figure of it."""
        return Row(
            metric=metric, unit=unit, value=value, higher_is_better=higher, workload=f"{self.text}{more}",
            machine=machine(), **rest,
        )  # fmt: skip


def make_workload(text: str, requests: Sequence[TraceRequest]) -> Workload:
    """Hashes all prompts once."""
    block_size = FleetShape().engine.block_size
    return Workload(text, requests, [request.prompt_hashes(block_size) for request in requests])


def check_oracle(requests: Sequence[TraceRequest], path: Path, pools: Sequence[int]) -> int:
    """Compares each line; returns the lines compared. AssertionError names the first line that differs."""
    compared = 0
    for pool in pools:
        expected = read_oracle(path, f"lru_{pool}")[: len(requests)]
        for line, (hit, oracle) in enumerate(zip(hit_blocks(requests, pool), expected, strict=True)):
            assert hit == oracle, f"{path.name}, pool of {pool}: request {line} hits {hit} blocks, not {oracle}"
        compared += len(requests)
    return compared


def dynamo_summary(options: Options, trace: Path) -> Peer:
    """Medians over Dynamo's replays of the trace, whose ties are drawn; None, said aloud, without the peers."""
    summaries: list[dict[str, Any]] = []
    for _ in range(DYNAMO_ROUNDS):
        command = [str(options.peers / "bin" / "python"), dynamo_replay.__file__, str(trace), "kv", "1.0"]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no replay by Dynamo beside it: {error}")
            return None
        summaries.append(json.loads(done.stdout.splitlines()[-1]))
    keys = ("prefix_cache_reused_ratio", "mean_ttft_ms", "p95_ttft_ms", "p99_ttft_ms")
    return {key: statistics.median(summary[key] for summary in summaries) for key in keys}


def quality_rows(load: Workload, label: str, outcome: Outcome, peer: Peer, hit_goal: str) -> list[Row]:
    """Hit rate and times to the first token of one replay, beside Dynamo's."""
    rows = []
    for metric, unit, value, key, goal in (
        ("prefix hit rate", "share", outcome.hit_rate, "prefix_cache_reused_ratio", hit_goal),
        ("TTFT mean", "ms", outcome.mean_ttft_ms, "mean_ttft_ms", BETTER),
        ("TTFT p95", "ms", outcome.ttft_ms(0.95), "p95_ttft_ms", BETTER),
        ("TTFT p99", "ms", outcome.ttft_ms(0.99), "p99_ttft_ms", ""),
    ):
        rows.append(
            load.row(
                f"{metric}, {label}", unit, value, higher=unit == "share", goal=goal if hit_goal and goal else None,
                baseline="Dynamo replay, KV mode" if peer else None, baseline_value=peer[key] if peer else None,
            )
        )  # fmt: skip
    imbalance = load.row(
        f"busiest engine's computed tokens over the mean, {label}", "x", outcome.imbalance, higher=False
    )
    return [*rows, imbalance]


def placement_rows(load: Workload, peer: Peer) -> list[Row]:
    """Other placements at the recorded rate."""
    rows = []
    for label, placement in PLACEMENTS.items():
        rows += quality_rows(load, label, load.run(FleetShape(), placement), peer, "")
    return rows


def product_rows(name: str, load: Workload, peer: Peer) -> list[Row]:
    """The product's placement at the recorded rate, with events at once and behind a late and lossy bus."""
    rows = quality_rows(load, "Tidemill", load.run(FleetShape()), peer, f">= {HIT_GOALS[name]}")
    for label, faults in FAULTS.items():
        rows += quality_rows(load, f"Tidemill, {label}", load.run(FleetShape(faults=faults)), peer, "")
    return rows


def capacity_rows(load: Workload, fleet_text: str, fleet: FleetShape) -> list[Row]:
    """Hit rate and the highest rate within the targets: L1 by load only, L1 by prefix, all tiers by prefix."""
    targets = Targets(warm_up_requests=min(WARM_UP_REQUESTS, len(load.requests) // 4))
    text = (
        f", {targets.warm_up_requests:,} of them to fill the caches; {fleet_text}; {targets.share:.0%} of requests"
        f" with TTFT <= {targets.ttft_s:g} s and TPOT <= {targets.tpot_s * 1e3:g} ms; {TIERS_TEXT}"
    )
    shapes: dict[str, tuple[FleetShape, MakePlacement]] = {
        "L1 only, by load only": (fleet, load_only),
        "L1 only, Tidemill": (fleet, tidemill),
        "L1 to L3, Tidemill": (replace(fleet, tiers=TIERS), tidemill),
    }
    rows: list[Row] = []
    first: tuple[float, float] | None = None
    for label, (shape, placement) in shapes.items():

        def run(speed: float, shape: FleetShape = shape, placement: MakePlacement = placement) -> Outcome | None:
            return replay_within(load.requests, load.hashes, shape, placement, targets, speed=speed)

        _, best = highest_speed(run, first=FIRST_SPEED, step=SPEED_STEP, within=SPEED_WITHIN)
        hits, rate = best.hit_rate, best.requests_per_s
        first = first or (hits, rate)
        all_tiers = shape.tiers.l3_blocks > 0
        for metric, unit, value, base, goal in (
            ("hit rate at the highest rate", "share", hits, first[0], ">= +0.20 over L1 by load only"),
            ("highest rate within the targets", "requests/s", rate, first[1], ">= 1.3x L1 by load only"),
        ):
            rows.append(
                load.row(
                    f"{metric}, {label}", unit, value, higher=True, more=text, goal=goal if all_tiers else None,
                    baseline="L1 only, by load only", baseline_value=base,
                )
            )  # fmt: skip
    return rows


def agent_rows(options: Options, limit: int) -> list[Row]:
    """Hit rate of agent sessions by tier and size of L1."""
    path = options.traces / "kv-cache-tester" / "agent_sessions_compact.jsonl"
    if not path.exists():
        print(f"no agent sessions: {path} is not there")
        return []
    requests = read_agent_sessions(path, FleetShape().engine.block_size, sessions=50, every_s=20.0, seconds=3600.0)
    load = make_workload("kv-cache-tester, 50 sessions, one more each 20 s, first hour, 8 engines", requests[:limit])
    rows = []
    for blocks in AGENT_L1_BLOCKS:
        engine = replace(FleetShape().engine, num_blocks=blocks)
        for tiers_text, tiers in (("L1 only", TierShape()), (TIERS_TEXT, TIERS)):
            outcome = load.run(FleetShape(engine=engine, tiers=tiers))
            for tier in (1, 2, 3) if tiers.l3_blocks else (1,):
                rows.append(
                    load.row(
                        f"hit rate in L{tier}, {blocks:,} blocks of L1 an engine", "share", outcome.tier_rate(tier),
                        higher=True, more=f"; {tiers_text}",
                    )
                )  # fmt: skip
    return rows


def run(options: Options) -> list[Row]:
    """All replays."""
    limit = QUICK_REQUESTS if options.quick else 1_000_000
    rows: list[Row] = []
    for name in TRACES:
        trace = options.traces / "mooncake" / f"{name}_trace.jsonl"
        requests = read_mooncake(trace)[:limit]
        oracle = options.traces / "oracle" / f"{name}_per_request.csv"
        if oracle.exists():
            print(f"{name}: {check_oracle(requests, oracle, ORACLE_POOLS)} lines equal the oracle's hits")
        load = make_workload(f"Mooncake {name}, 8 engines x 4,096 blocks of 512 tokens", requests)
        if options.part == "faults":
            rows += product_rows(name, load, None)
            continue
        peer = None if options.quick else dynamo_summary(options, trace)
        rows += placement_rows(load, peer) + product_rows(name, load, peer)
        for text, fleet in CAPACITY_FLEETS.items():
            rows += capacity_rows(load.head(min(limit, CAPACITY_REQUESTS)), text, fleet)
    return rows if options.part else rows + agent_rows(options, limit)
