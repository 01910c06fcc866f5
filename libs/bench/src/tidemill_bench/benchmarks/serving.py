"""CPU serving of SmolLM2-135M beside HF transformers `generate` and vLLM's CPU build, on the same checkpoint.

512 prompt tokens of which 256 are shared by all requests of a round, 128 output tokens, greedy. Rounds of the engines
alternate; each figure is the median of its rounds. Prefixes differ between rounds, so that each round starts cold.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tidemill_bench.local_cluster import real_model_cluster
from tidemill_bench.openai_load import Run, Timing, closed_loop
from tidemill_bench.options import Options
from tidemill_bench.peers import hf_generate
from tidemill_bench.peers.vllm_cpu import vllm_server
from tidemill_bench.report import Row, machine
from tidemill_bench.workload import completion_body, shared_prefix_prompts

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS, VOCAB_SIZE = 512, 256, 128, 49152
REQUESTS = {1: 8, 4: 16, 8: 32}
HF_REQUESTS = {1: 2, 4: 4, 8: 8}
"""`generate` has no server: one batch of the concurrency's size, once more at concurrency 1."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A system under test: runs prompts at a concurrency."""

    name: str
    requests: dict[int, int]
    run: Callable[[list[list[int]], int], Run]


def _http_engine(name: str, port: int, model: str) -> Engine:
    def run(prompts: list[list[int]], concurrency: int) -> Run:
        bodies = [completion_body(model, prompt, OUTPUT_TOKENS) for prompt in prompts]
        return asyncio.run(closed_loop("127.0.0.1", port, bodies, concurrency))

    return Engine(name=name, requests=REQUESTS, run=run)


@contextmanager
def _hf_engine(model_dir: Path, threads: int) -> Iterator[Engine]:
    argv = [sys.executable, hf_generate.__file__, str(model_dir), str(threads)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        stdout.readline()

        def run(prompts: list[list[int]], concurrency: int) -> Run:
            timings: list[Timing] = []
            wall_s = 0.0
            for first in range(0, len(prompts), concurrency):
                batch = prompts[first : first + concurrency]
                stdin.write(json.dumps({"prompts": batch, "output_tokens": OUTPUT_TOKENS}) + "\n")
                stdin.flush()
                answer = json.loads(stdout.readline())
                wall_s += answer["total_s"]
                timings += [
                    Timing(
                        ttft_s=answer["ttft_s"],
                        total_s=answer["total_s"],
                        output_tokens=OUTPUT_TOKENS,
                        cached_tokens=0,
                        longest_gap_s=0.0,
                    )
                    for _ in batch
                ]
            return Run(timings=timings, wall_s=wall_s)

        yield Engine(name="HF transformers fp32", requests=HF_REQUESTS, run=run)
        stdin.close()


def _measure(engines: list[Engine], concurrencies: list[int], rounds: int) -> dict[tuple[str, int], list[Run]]:
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for round_number in range(rounds):
        for concurrency in concurrencies:
            for engine in engines:
                prompts = shared_prefix_prompts(
                    engine.requests[concurrency],
                    prompt_tokens=PROMPT_TOKENS,
                    shared_tokens=SHARED_TOKENS,
                    vocab_size=VOCAB_SIZE,
                    seed=1000 * round_number + concurrency,
                )
                run = engine.run(prompts, concurrency)
                runs[engine.name, concurrency].append(run)
                print(
                    f"round {round_number} concurrency {concurrency} {engine.name}: "
                    f"{run.output_tokens_per_s:.1f} tokens/s, TTFT p50 {run.ttft_p50_s * 1000:.0f} ms, "
                    f"TPOT p50 {run.tpot_p50_s * 1000:.1f} ms",
                    flush=True,
                )
    return runs


def workload(runs: dict[tuple[str, int], list[Run]], ours: str, peer: str | None, concurrency: int) -> str:
    """What was run; a peer that was asked for less than we were is told apart."""
    rounds = runs[ours, concurrency]
    asked = len(rounds[0].timings)
    text = (
        f"SmolLM2-135M, {PROMPT_TOKENS} prompt tokens ({SHARED_TOKENS} shared), {OUTPUT_TOKENS} output tokens, greedy, "
        f"{asked} requests, median of {len(rounds)} rounds"
    )
    peers_asked = len(runs[peer, concurrency][0].timings) if peer else asked
    return text if peers_asked == asked else f"{text}; the baseline: {peers_asked} requests in batches of {concurrency}"


def rows_of(runs: dict[tuple[str, int], list[Run]], ours: str, peers: list[str], concurrencies: list[int]) -> list[Row]:
    """The medians of all rounds, each beside each peer's."""
    figures: list[tuple[str, str, bool, Callable[[Run], float], str]] = [
        ("output", "tokens/s", True, lambda run: run.output_tokens_per_s, ">= 1.5x vLLM"),
        ("TTFT p50", "ms", False, lambda run: run.ttft_p50_s * 1000, "<= 0.6x vLLM"),
        ("TPOT p50", "ms", False, lambda run: run.tpot_p50_s * 1000, ""),
    ]
    baselines: list[str | None] = [*peers] or [None]
    rows = []
    for concurrency in concurrencies:
        for metric, unit, higher, figure, goal in figures:
            for peer in baselines:
                has_goal = bool(goal) and peer is not None and "vLLM" in peer
                rows.append(
                    Row(
                        metric=f"{metric}, concurrency {concurrency}",
                        unit=unit,
                        value=median(figure(run) for run in runs[ours, concurrency]),
                        higher_is_better=higher,
                        baseline=peer,
                        baseline_value=median(figure(run) for run in runs[peer, concurrency]) if peer else None,
                        goal=goal if has_goal else None,
                        workload=workload(runs, ours, peer, concurrency),
                        machine=machine(),
                    )
                )
    return rows


def run(options: Options) -> list[Row]:
    """Starts all engines, alternates their rounds, stops them."""
    concurrencies = list(REQUESTS)
    with ExitStack() as stack:
        cluster = stack.enter_context(real_model_cluster(options, {}))
        ours = _http_engine("Tidemill", cluster.http_port, cluster.model)
        engines = [ours]
        if (options.peers / ".ready").exists():
            port = stack.enter_context(
                vllm_server(
                    options.peers,
                    cluster.model_dir,
                    dtype="float32",
                    start_timeout_s=600,
                    log=options.home / "vllm.log",
                )
            )
            engines.append(_http_engine("vLLM CPU 0.32.0 fp32", port, "peer"))
        else:
            print(f"vLLM is not installed in {options.peers}: `make bench-deps` installs it; rows stand without it")
        engines.append(stack.enter_context(_hf_engine(cluster.model_dir, os.cpu_count() or 1)))
        for engine in engines:
            engine.run(shared_prefix_prompts(1, prompt_tokens=64, shared_tokens=0, vocab_size=VOCAB_SIZE, seed=7), 1)
        runs = _measure(engines, concurrencies, rounds=1 if options.quick else 2)
    return rows_of(runs, ours.name, [engine.name for engine in engines[1:]], concurrencies)
