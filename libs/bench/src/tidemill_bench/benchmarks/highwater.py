"""Decode when outputs outgrow the pool: admission by present use alone, beside the high-water mark.

Output lengths are log-normal with a long tail, and some requests loop until their limit. The product's scheduler and
cache run over a clock that steps move by a fixed cost. Figures are of the requests that do not loop, over several seeds
that no setting was tuned on; "worst seed" is the largest ratio to the plain policy that any of them has.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from tidemill_bench.benchmarks.fair import COST, replace_settings
from tidemill_bench.options import Options
from tidemill_bench.report import Row
from tidemill_bench.simulation.engine_clock import Arrival, CostedRunner, Life, simulated
from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.step_cost import StepCost

DECODE_COST = StepCost(COST.base_s, COST.prefill_token_s, COST.prefill_context_s, 5e-5, 2e-8)
"""As `fair`, and 50 us for each decode row, 20 ns for each token of its context."""
POLICIES: dict[str, dict[str, object]] = {
    "present use": {"kv_high_water": 2.0, "forecast_growth": False},
    "high water": {"kv_high_water": 0.95, "forecast_growth": False},
    "forecast": {"kv_high_water": 0.95, "forecast_growth": True},
    "tpot": {"kv_high_water": 0.95, "most_tpot_load": 1.0},
}
"""The last two are the gates that are off by default, beside the mark."""
SLO_TPOT_S = 0.012
"""Target of every request: decode steps without prompts keep to it until the pools here are some nine tenths full."""
BASELINE = "present use"
GOALS = ("end to end mean", "end to end P99", "TTFT mean", "TTFT P99")
WITHIN_TARGET = "share of tokens within target"
NOISE = 0.02
"""Two runs of one policy whose steps differ by their 5 % noise lie so far apart."""
SEEDS = (31, 32, 33)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests with hidden output lengths, and the pool that they share."""

    name: str
    count: int
    rate_per_s: float
    prompt_tokens: int
    median_output: int
    max_tokens: int
    loop_share: float
    num_blocks: int

    @property
    def description(self) -> str:
        """For the table."""
        return (
            f"{self.count} requests, {self.rate_per_s:g}/s Poisson, {self.prompt_tokens} prompt tokens, output of "
            f"median {self.median_output} (log-normal, sigma 1), at most {self.max_tokens}; {self.loop_share:.0%} "
            f"loop; pool of {self.num_blocks * 64} tokens"
        )

    def arrivals(self, seed: int) -> tuple[list[Arrival], dict[int, int]]:
        """Requests, and the output length by the first token of each that does not loop."""
        rng, made, lengths, at_s = random.Random(seed), [], {}, 0.0
        for index in range(self.count):
            output = min(self.max_tokens - 1, max(1, round(self.median_output * rng.lognormvariate(0.0, 1.0))))
            loops = rng.random() < self.loop_share
            first = 1000 + index
            if not loops:
                lengths[first] = output
            made.append(
                Arrival(
                    at_s=at_s,
                    token_ids=[first, *[1] * (self.prompt_tokens - 1)],
                    output_tokens=0 if loops else output,
                    max_tokens=self.max_tokens,
                    stage="whole",
                    slo_tpot_s=SLO_TPOT_S,
                )
            )
            at_s += rng.expovariate(self.rate_per_s)
        return made, lengths


def workloads(quick: bool) -> list[Workload]:
    """Short prompts, cheap to compute again, and longer ones, which are not; with and without outputs in loops."""
    count = 100 if quick else 600
    short = Workload(name="short prompts", count=count, rate_per_s=16.0, prompt_tokens=200, median_output=200,
                     max_tokens=4096, loop_share=0.02, num_blocks=600)  # fmt: skip
    long = Workload(name="long prompts", count=count // 3, rate_per_s=1.5, prompt_tokens=6000, median_output=400,
                    max_tokens=4096, loop_share=0.02, num_blocks=2400)  # fmt: skip
    return [
        short,
        replace(short, name="middling prompts", count=count // 2, rate_per_s=5.0, prompt_tokens=1500, median_output=300,
                num_blocks=1200),
        long,
        replace(long, name="long prompts, no loops", loop_share=0.0),
    ]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What one seed gave."""

    usual: list[Life]
    """Requests that do not loop."""
    recomputed_tokens: int
    preemptions: int


def measure(workload: Workload, options: dict[str, object], seed: int) -> Found:
    """One policy over one seed's requests."""
    arrivals, lengths = workload.arrivals(seed)
    settings = EngineSettings(
        model_dir="", block_size=64, num_blocks=workload.num_blocks, max_num_seqs=128, max_num_batched_tokens=2048,
        max_waiting_requests=10**6,
    )  # fmt: skip
    runner = CostedRunner(DECODE_COST, workload.num_blocks, lengths)
    clock = simulated(replace_settings(settings, **options), runner)
    lives = clock.run(arrivals)
    assert clock.engine.cache.used_blocks == 0, "blocks are left"
    assert not any(life.error for life in lives), "a request failed"
    load = clock.engine.scheduler.load_sample()
    recomputed = runner.num_prefill_tokens - workload.count * workload.prompt_tokens
    usual = [life for life in lives if life.arrival.output_tokens]
    return Found(usual, max(0, recomputed), load.preemptions_total)


def figures(found: Sequence[Found]) -> dict[str, tuple[str, float]]:
    """(unit, value) by name, of all seeds together."""
    usual = [life for one in found for life in one.usual]
    return {
        **_times("end to end", [life.end_s for life in usual]),
        **_times("TTFT", [life.first_token_s for life in usual]),
        **_times("longest gap between tokens", [life.longest_gap_s for life in usual]),
        WITHIN_TARGET: ("", 1 - sum(life.num_late_tokens for life in usual) / sum(life.num_tokens for life in usual)),
        "prompt tokens computed again": ("tokens", float(sum(one.recomputed_tokens for one in found))),
        "preemptions": ("", float(sum(one.preemptions for one in found))),
    }


def worst_seed(found: Sequence[Found], plain: Sequence[Found]) -> dict[str, tuple[str, float]]:
    """The largest ratio to the plain policy of any seed, of each figure with a goal."""
    pairs = [(figures([one]), figures([other])) for one, other in zip(found, plain, strict=True)]
    return {f"{name}, worst seed": ("x", max(one[name][1] / other[name][1] for one, other in pairs)) for name in GOALS}


def _times(name: str, seconds: Sequence[float]) -> dict[str, tuple[str, float]]:
    return {f"{name} mean": ("s", float(np.mean(seconds))), f"{name} P99": ("s", float(np.percentile(seconds, 99)))}


def run(options: Options) -> list[Row]:
    """Every policy over every workload."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = []
    seeds = SEEDS[:1] if options.quick else SEEDS
    for workload in workloads(options.quick):
        lives = {policy: [measure(workload, settings, seed) for seed in seeds] for policy, settings in POLICIES.items()}
        found = {policy: figures(one) for policy, one in lives.items()}
        text = f"{len(seeds)} x {workload.description}"
        rows += [
            Row(
                metric=f"{name}, {workload.name}, high water",
                unit=unit,
                value=value,
                higher_is_better=False,
                goal=f"<= {1 + NOISE:g}",
                workload=text,
                machine=f"simulated engine: {DECODE_COST}",
            )
            for name, (unit, value) in worst_seed(lives["high water"], lives[BASELINE]).items()
        ]
        rows += [
            Row(
                metric=f"{name}, {workload.name}, {policy}",
                unit=unit,
                value=value,
                higher_is_better=name == WITHIN_TARGET,
                baseline=BASELINE,
                baseline_value=found[BASELINE][name][1],
                goal=f"<= {1 + NOISE:g}x" if policy == "high water" and name in GOALS else None,
                workload=text,
                machine=f"simulated engine: {DECODE_COST}",
            )
            for policy, figures in found.items()
            if policy != BASELINE
            for name, (unit, value) in figures.items()
        ]
    return rows
