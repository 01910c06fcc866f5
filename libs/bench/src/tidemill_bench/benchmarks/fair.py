"""The order of prompts: time to first token under each prefill policy, beside first come, first served.

Simulated (the default): the product's scheduler, cache and cost model over a clock that steps move by a fixed cost with
5 % noise. `--engine real`: the CPU engine computes SmolLM2-135M at a small scale. The goals are what the policy has to
reach against first come, first served on the same engine.
"""

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_bench.simulation.engine_clock import Arrival, CostedRunner, EngineClock, Life, simulated
from tidemill_bench.simulation.trace import read_mooncake
from tidemill_engine.engine import Engine
from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.step_cost import StepCost
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2

COST = StepCost(base_s=0.008, prefill_token_s=1 / 20_000, prefill_context_s=3.3e-10)
"""Of a prefill step: 20,000 tokens a second at empty context, three quarters of it at 50,000 tokens."""
POLICIES = ("fcfs", "shortest", "quota", "fair")
GOALS = {"mean": 0.822, "P50": 0.74, "P90": 0.86, "P95": 0.879, "P99": 1.0}
"""Relative to first come, first served: the published figures, and no loss at all at P99 (they allow 1.027)."""
LOADS = (0.6, 0.75, 0.85)
TARGET_SHARE, TARGETS_S = 0.3, (1.0, 30.0)
"""Of the workload "targets": so many requests want their first token within the first, the others within the second."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Arrivals, and what the engine that serves them is like."""

    name: str
    description: str
    rounds: Sequence[Sequence[Arrival]]
    settings: EngineSettings


SIMULATED = EngineSettings(
    model_dir="",
    block_size=64,
    num_blocks=8192,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_waiting_requests=10**6,
)


def mixed(count: int, load: float, seed: int, *, short: tuple[int, int], long: tuple[int, int], cost: StepCost,
          chunk: int) -> list[Arrival]:  # fmt: skip
    """Poisson arrivals, 5 % of them long. `short` and `long`: median and longest length, log-normal; long prompts have
    at least half the median. The load is the cost of all prompts, each alone, over the time of their arrivals."""
    rng, lengths = random.Random(seed), []
    for _ in range(count):
        median, most = long if rng.random() < 0.05 else short
        least = median // 2 if (median, most) == long else 16
        spread = 0.6 if (median, most) == long else 0.9
        lengths.append(min(most, max(least, round(median * rng.lognormvariate(0.0, spread)))))
    mean_s = sum(cost.prefill_s(length, 0, chunk) for length in lengths) / count
    arrivals, at_s = [], 0.0
    for index, length in enumerate(lengths):
        arrivals.append(Arrival(at_s=at_s, token_ids=[1000 + index, *[1] * (length - 1)]))
        at_s += rng.expovariate(load / mean_s)
    return arrivals


def simulated_workloads(options: Options) -> list[Workload]:
    """The mixed workload at three loads and in a small pool, and a public trace where there is one."""
    count, seeds = (300, 1) if options.quick else (2000, 2)
    made = []
    for load in LOADS:
        rounds = [
            mixed(count, load, seed, short=(800, 8192), long=(32_768, 131_072), cost=COST, chunk=2048)
            for seed in range(seeds)
        ]
        text = f"{seeds} x {count} prompts, 95 % of median 800 tokens, 5 % of median 32,768 (most 131,072), Poisson"
        described = f"{text}, load {load}"
        made.append(Workload(name=f"load {load}", description=described, rounds=rounds, settings=SIMULATED))
        if load == 0.75:
            made.append(with_targets(made[-1]))
            small = replace_settings(SIMULATED, num_blocks=3072)
            described += ", pool of 1.5 longest prompts"
            made.append(Workload(name="small pool", description=described, rounds=rounds, settings=small))
    trace = options.traces / "mooncake" / "conversation_trace.jsonl"
    if trace.exists():
        made.append(mooncake(options, 0.75))
    else:
        print(f"no {trace}: without the public trace")
    return made


def with_targets(workload: Workload) -> Workload:
    """The same arrivals, of any length some of them with a near target and all others with a far one."""
    rng, (near_s, far_s) = random.Random(3), TARGETS_S
    rounds = [
        [replace(arrival, slo_ttft_s=near_s if rng.random() < TARGET_SHARE else far_s) for arrival in arrivals]
        for arrivals in workload.rounds
    ]
    text = f"{workload.description}; TTFT target {near_s:g} s for {TARGET_SHARE:.0%}, {far_s:g} s for the others"
    return replace(workload, name="targets", description=text, rounds=rounds)


def targets_met(lives: Sequence[Life]) -> dict[str, float]:
    """Share of requests with their first token within their target: of those with the near one, and of all."""
    near = [life for life in lives if life.arrival.slo_ttft_s == TARGETS_S[0]]
    return {
        name: sum(life.first_token_s <= life.arrival.slo_ttft_s for life in some) / len(some)
        for name, some in (("share of near targets met", near), ("share of targets met", lives))
    }


def target_rows(workload: Workload, lives: dict[str, list[Life]], place: str) -> list[Row]:
    """Each policy beside first come, first served, and "fair" told of no targets beside "fair" that knows them."""
    untold = replace(
        workload, rounds=[[replace(arrival, slo_ttft_s=0.0) for arrival in arrivals] for arrivals in workload.rounds]
    )
    blind = [
        replace(life, arrival=told.arrival) for life, told in zip(simulate(untold, "fair"), lives["fair"], strict=True)
    ]
    met = {policy: targets_met(found) for policy, found in (lives | {"fair without targets": blind}).items()}
    return [
        Row(
            metric=f"{name}, {workload.name}, {policy}",
            unit="",
            value=value,
            higher_is_better=True,
            baseline="fcfs",
            baseline_value=met["fcfs"][name],
            goal=">= 1x" if policy == "fair" else None,
            workload=workload.description,
            machine=place,
        )
        for policy in met
        if policy != "fcfs"
        for name, value in met[policy].items()
    ]


def mooncake(options: Options, load: float) -> Workload:
    """The conversation trace with its shared prefixes, its time stretched to the load."""
    path = options.traces / "mooncake" / "conversation_trace.jsonl"
    requests = read_mooncake(path, 300 if options.quick else 3000)
    work_s = sum(COST.prefill_s(request.input_tokens, 0, 2048) for request in requests)
    stretch = work_s / load / (requests[-1].arrival_s - requests[0].arrival_s)
    rng = random.Random(0)
    arrivals = [
        # Times of the trace fall on ticks of three seconds.
        Arrival(at_s=(request.arrival_s + rng.uniform(0, 3)) * stretch,
                token_ids=request.token_ids(512)[: request.input_tokens].tolist())
        for request in requests
    ]  # fmt: skip
    return Workload(
        name="mooncake",
        description=f"{len(requests)} requests of Mooncake's conversation trace, load {load} without its prefix hits",
        rounds=[arrivals],
        settings=replace_settings(SIMULATED, num_blocks=16_384),
    )


def replace_settings(settings: EngineSettings, **changes: object) -> EngineSettings:
    """A copy with some fields changed."""
    fields = {name: getattr(settings, name) for name in EngineSettings.__struct_fields__}
    return EngineSettings(**(fields | changes))  # type: ignore[arg-type]


def simulate(workload: Workload, policy: str) -> list[Life]:
    """All rounds, each on a fresh engine; every request must end, and nothing may be left."""
    lives = []
    for arrivals in workload.rounds:
        runner = CostedRunner(COST, workload.settings.num_blocks)
        clock = simulated(replace_settings(workload.settings, prefill_policy=policy), runner)
        lives += clock.run(arrivals)
        assert clock.engine.cache.used_blocks == 0, "blocks are left"
    assert all(not life.error for life in lives), "a request failed"
    return lives


def over_bound(workload: Workload, lives: Sequence[Life], cost: StepCost) -> float:
    """The largest wait over its stated bound: slack + the work that an engine in any order has left by then."""
    worst, first, settings = 0.0, 0, workload.settings
    chunk_s = cost.prefill_s(settings.max_num_batched_tokens, 0, settings.max_num_batched_tokens)
    for arrivals in workload.rounds:
        part = sorted(lives[first : first + len(arrivals)], key=lambda life: life.arrival.at_s)
        first += len(arrivals)
        work = [cost.prefill_s(len(life.arrival.token_ids), 0, settings.max_num_batched_tokens) for life in part]
        times = [life.arrival.at_s for life in part]
        free, free_s = [], -math.inf
        for at_s, work_s in zip(times, work, strict=True):
            free_s = max(free_s, at_s) + work_s
            free.append(free_s)
        for life, work_s in zip(part, work, strict=True):
            due_s = life.arrival.at_s + min(settings.fair_stretch * work_s, settings.fair_slack_s)
            last = np.searchsorted(times, due_s, side="right") - 1
            bound_s = max(due_s, free[last]) - life.arrival.at_s + 2 * chunk_s
            worst = max(worst, life.first_token_s / bound_s)
    return worst


def bound_row(workload: Workload, lives: Sequence[Life], cost: StepCost, place: str) -> Row:
    """The longest wait of all, by its own bound."""
    return Row(
        metric=f"longest wait over its bound, {workload.name}, fair",
        unit="x",
        value=over_bound(workload, lives, cost),
        higher_is_better=False,
        goal="<= 1",
        workload=workload.description,
        machine=place,
    )


def figures(lives: Sequence[Life]) -> dict[str, float]:
    """TTFT: mean, percentiles, longest."""
    waits = np.array([life.first_token_s for life in lives])
    percentiles = {f"P{p:g}": float(np.percentile(waits, p)) for p in (50, 90, 95, 99, 99.9)}
    return {"mean": float(waits.mean()), **percentiles, "longest": float(waits.max())}


def rows_of(workload: Workload, by_policy: dict[str, dict[str, float]], place: str) -> list[Row]:
    """Each policy beside first come, first served."""
    base = by_policy["fcfs"]
    return [
        Row(
            metric=f"TTFT {name}, {workload.name}, {policy}",
            unit="s",
            value=value,
            higher_is_better=False,
            baseline="fcfs",
            baseline_value=base[name],
            goal=f"<= {GOALS[name]:g}x" if policy == "fair" and name in GOALS else None,
            workload=workload.description,
            machine=place,
        )
        for policy in by_policy
        if policy != "fcfs"
        for name, value in by_policy[policy].items()
    ]


def run(options: Options) -> list[Row]:
    """Every policy over every workload."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.engine == "real":
        return run_real(options)
    place = f"simulated engine: {COST}"
    rows = []
    for workload in simulated_workloads(options):
        lives = {policy: simulate(workload, policy) for policy in POLICIES}
        rows += rows_of(workload, {policy: figures(found) for policy, found in lives.items()}, place)
        rows.append(bound_row(workload, lives["fair"], COST, place))
        if workload.name == "targets":
            rows += target_rows(workload, lives, place)
    return rows


def run_real(options: Options) -> list[Row]:
    """SmolLM2-135M on one core; rounds of the policies alternate over the same arrivals."""
    from tidemill_engine.model_runner import ModelRunner
    from tidemill_engine.parallel.tp import TensorParallel

    settings = EngineSettings(
        model_dir=str(ensure_smollm2(Home(options.home))), num_blocks=512, max_num_seqs=16, max_num_batched_tokens=64,
        torch_threads=1,
    )  # fmt: skip
    runner = ModelRunner(settings, TensorParallel(0, 1, ""))
    runner.warm_up()
    cost = _measured_cost(settings, runner)
    count, chunk = (20 if options.quick else 80), settings.max_num_batched_tokens
    rounds = [
        mixed(count, 0.75, seed, short=(24, 64), long=(500, 800), cost=cost, chunk=chunk)
        for seed in range(1 if options.quick else 2)
    ]
    text = (
        f"{len(rounds)} x {count} prompts, 95 % of median 24 tokens, 5 % of median 500 (most 800), Poisson, load 0.75"
    )
    workload = Workload(name="real", description=f"SmolLM2-135M, {text}", rounds=rounds, settings=settings)
    lives: dict[str, list[Life]] = {"fcfs": [], "fair": []}
    for arrivals in rounds:
        for policy, found in lives.items():
            engine = Engine(replace_settings(settings, prefill_policy=policy), runner)
            found += EngineClock(engine, time.monotonic, _sleep_until, stop_token=-1).run(arrivals)
    assert not any(life.error for found in lives.values() for life in found), "a request failed"
    rows = rows_of(workload, {policy: figures(found) for policy, found in lives.items()}, machine())
    return [*rows, bound_row(workload, lives["fair"], cost, machine())]


def _sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))


def _measured_cost(settings: EngineSettings, runner: object) -> StepCost:
    """What the engine learns of its steps from a few prompts of all lengths."""
    engine = Engine(settings, runner)  # type: ignore[arg-type]
    rng = random.Random(9)
    lengths = [rng.choice([8, 24, 60, 250]) for _ in range(24)]
    arrivals = [Arrival(at_s=0.0, token_ids=[40_000 + i, *[2] * (n - 1)]) for i, n in enumerate(lengths)]
    EngineClock(engine, time.monotonic, _sleep_until, stop_token=-1).run(arrivals)
    return engine.scheduler.state.load.cost.model
