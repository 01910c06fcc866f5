"""Times the engine alone: decode steps and prompt chunks for each weight format, beside the byte floor.

    python bench/engine_step.py MODEL_DIR [--weights auto fp32] [--threads 1] [--context 512]

The byte floor of a decode step is what it must read (weights once, KV of every sequence) over the machine's measured
copy bandwidth.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tidemill_engine.layers.linear import FullPrecision, PackedLinear
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, ScheduledRow, SchedulerOutput

BLOCK_SIZE = 32
BATCHES = (1, 4, 8)
DECODE_STEPS = 24
PREFILL_RUNS = 3


def main() -> None:
    """Prints one line for each weight format and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--weights", nargs="+", default=["auto", "bf16", "fp32"])
    parser.add_argument("--kv-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    read_bytes_per_s = read_bandwidth()
    print(f"read bandwidth {read_bytes_per_s / 1e9:.1f} GB/s, {arguments.threads} threads")
    for weights in arguments.weights:
        settings = EngineSettings(
            model_dir=arguments.model_dir,
            weights=weights,
            kv_dtype=arguments.kv_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=(arguments.context // BLOCK_SIZE + 4) * max(BATCHES),
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=arguments.context,
            torch_threads=arguments.threads,
        )
        report(ModelRunner(settings, TensorParallel()), arguments.context, read_bytes_per_s)


def report(runner: ModelRunner, context: int, read_bytes_per_s: float) -> None:
    """Times one loaded model."""
    runner.warm_up()
    bench = Bench(runner, context)
    seconds = min(bench.prefill(0) for _ in range(PREFILL_RUNS))
    print(f"{runner.backend}: prefill {context} tokens {seconds * 1e3:.0f} ms = {context / seconds:.0f} tokens/s")
    for batch in BATCHES:
        median, best = bench.decode(batch)
        kv_bytes = runner.kv_bytes_per_token * (context + DECODE_STEPS // 2) * batch
        floor = (weight_bytes(runner) + kv_bytes) / read_bytes_per_s
        print(
            f"{runner.backend}: decode batch {batch}: median {median * 1e3:.1f} ms, best {best * 1e3:.1f} ms, "
            f"{batch / median:.0f} tokens/s; byte floor {floor * 1e3:.1f} ms"
        )


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

    def decode(self, batch: int) -> tuple[float, float]:
        """Median and best seconds of a decode step."""
        for row in range(batch):
            self.prefill(row)
        times = []
        for position in range(self.context, self.context + DECODE_STEPS):
            rows = [ScheduledRow(row, position, 1, [], True) for row in range(batch)]
            step = SchedulerOutput(step=1, rows=rows)
            times.append(timed(partial(self.runner.execute, step)))
        return sorted(times)[len(times) // 2], min(times)


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


if __name__ == "__main__":
    main()
