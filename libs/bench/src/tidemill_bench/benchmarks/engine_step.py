"""The CPU engine alone, one thread: decode steps and prompt chunks of SmolLM2 for each form of the weights.

The baseline of a decode step is its byte floor: what it must read (weights once, KV of every sequence) over the
machine's measured bandwidth.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import numpy as np
import torch

from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_engine.layers.linear import FullPrecision, PackedLinear
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, ScheduledRow, SchedulerOutput
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2

BLOCK_SIZE = 32
BATCHES = (1, 4, 8)
WEIGHTS: tuple[Literal["auto", "bf16", "fp32"], ...] = ("auto", "bf16", "fp32")
CONTEXT_TOKENS = 512
THREADS = 1
DECODE_STEPS = 24
PREFILL_RUNS = 3


def run(options: Options) -> list[Row]:
    """One model in memory at a time."""
    model_dir = ensure_smollm2(Home(options.home))
    torch.set_num_threads(THREADS)
    read_bytes_per_s = read_bandwidth()
    rows: list[Row] = []
    for weights in WEIGHTS[:1] if options.quick else WEIGHTS:
        settings = EngineSettings(
            model_dir=str(model_dir),
            weights=weights,
            block_size=BLOCK_SIZE,
            num_blocks=(CONTEXT_TOKENS // BLOCK_SIZE + 4) * max(BATCHES),
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=CONTEXT_TOKENS,
            torch_threads=THREADS,
        )
        rows += measure(ModelRunner(settings, TensorParallel()), weights, read_bytes_per_s)
    return rows


def measure(runner: ModelRunner, weights: str, read_bytes_per_s: float) -> Iterator[Row]:
    """Times one loaded model."""
    runner.warm_up()
    bench = Bench(runner, CONTEXT_TOKENS)
    name, where = f"{runner.backend}, weights {weights}", machine()
    workload = f"SmolLM2-135M, one thread, context {CONTEXT_TOKENS}"
    seconds = min(bench.prefill(0) for _ in range(PREFILL_RUNS))
    yield Row(metric=f"{name}: prompt", unit="tokens/s", value=CONTEXT_TOKENS / seconds, higher_is_better=True,
              workload=f"{workload}, best of {PREFILL_RUNS} whole prompts", machine=where)  # fmt: skip
    for batch in BATCHES:
        kv_bytes = runner.kv_bytes_per_token * (CONTEXT_TOKENS + DECODE_STEPS // 2) * batch
        floor_s = (weight_bytes(runner) + kv_bytes) / read_bytes_per_s
        yield Row(metric=f"{name}: decode step, batch {batch}", unit="ms", value=bench.decode(batch) * 1e3,
                  higher_is_better=False, baseline="byte floor", baseline_value=floor_s * 1e3,
                  workload=f"{workload}, median of {DECODE_STEPS} steps", machine=where)  # fmt: skip


class Bench:
    """Random prompts in the rows of a runner."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self.runner = runner
        self.context = context
        self.blocks_per_row = context // BLOCK_SIZE + 4
        self.random = np.random.default_rng(0)

    def prefill(self, row: int) -> float:
        """Seconds to compute a prompt from nothing."""
        blocks = range(row * self.blocks_per_row, (row + 1) * self.blocks_per_row)
        request = NewRequest(
            row=row,
            token_ids=self.random.integers(0, self.runner.vocab_size, self.context).tolist(),
            prompt_tokens=self.context,
            sampling=SamplingParams(temperature=0.0),
            block_ids=list(blocks),
            sequence_slot=row,
        )
        scheduled = [ScheduledRow(row, 0, self.context, [], True)]
        return timed(lambda: self.runner.execute(SchedulerOutput(step=1, new_requests=[request], rows=scheduled)))

    def decode(self, batch: int) -> float:
        """Median seconds of a decode step."""
        for row in range(batch):
            self.prefill(row)
        times = []
        for position in range(self.context, self.context + DECODE_STEPS):
            rows = [ScheduledRow(row, position, 1, [], True) for row in range(batch)]
            step = SchedulerOutput(step=1, rows=rows)
            times.append(timed(partial(self.runner.execute, step)))
        return sorted(times)[len(times) // 2]


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of all matrices that a decode step reads."""
    total = 0
    stack: list[object] = [runner.model]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, PackedLinear):
            total += item.packed.data.numel()
        elif isinstance(item, FullPrecision):
            total += item.weight.numel() * 4
        elif isinstance(item, list):
            stack += item
        elif type(item).__module__.startswith("tidemill_engine.models"):
            stack += vars(item).values()
    return total


def read_bandwidth() -> float:
    """Bytes/s of summing a large tensor."""
    data = torch.ones(64 << 20)
    return data.numel() * 4 / min(timed(data.sum) for _ in range(5))


def timed(run: Callable[[], object]) -> float:
    """Wall-clock seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
