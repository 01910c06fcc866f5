"""A model of DeepSeek-V4-Flash's layers, as many as fit one CUDA device: decode steps, chunks, prefill, and beside them
the plain torch path.

Weights are random, FP8 with a scale for each 128 x 128 values; rings and streams are bfloat16. Decode steps are
captured graphs over random rows in shuffled blocks; prompts run through engine and scheduler in this process (wall
clock).
"""

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import triton

from tidemill_bench.benchmarks.gpu_engine import copy_gigabytes_per_s, generate, random_prompts
from tidemill_bench.latent_parts import launched_ms
from tidemill_bench.options import Options
from tidemill_bench.random_tensors import RandomTensors, write_config
from tidemill_bench.report import Row
from tidemill_engine.cuda.attention import PageTable
from tidemill_engine.cuda.batch import StepRows
from tidemill_engine.cuda.reference_runner import ReferenceRunner
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.cuda.stream_model import CudaStreamModel
from tidemill_engine.cuda.timing import graph_ms
from tidemill_engine.engine import Engine
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, ScheduledRow, SchedulerOutput

SHAPE, SHORT_SHAPE = "deepseek-v4-flash, 6 layers", "deepseek-v4-flash, 3 layers"
CONTEXT_TOKENS = 131_072 + 8192
CHUNK = 8192
STEPS = ((1, 4096), (1, 131_072), (16, 4096), (16, 131_072), (64, 4096), (64, 32_768))
"""Rows and contexts of decode steps."""
CHUNKS = ((0, CHUNK), (131_072 - CHUNK, CHUNK))
"""Cached tokens before a chunk, and its tokens."""
PROMPTS = (8192, 32_768, 131_072)
PLAIN_ROWS, PLAIN_CONTEXT = 16, 512
"""Of the plain path's decode steps."""


def settings_of(shape: str, folder: Path, **fields: object) -> EngineSettings:
    common = {
        "model_dir": str(write_config(shape, folder, CONTEXT_TOKENS)),
        "device": "cuda",
        "kv_dtype": "bfloat16",
        "block_size": 128,
        "kv_memory_bytes": 6 << 30,
        "max_num_seqs": 64,
        "max_num_batched_tokens": CHUNK,
        "num_snapshots": 64,
    }
    return EngineSettings(**(common | fields))  # type: ignore[arg-type]


def open_runner(shape: str) -> tuple[CudaModelRunner, EngineSettings]:
    """Weights, kernels and graphs."""
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as folder:
        settings = settings_of(shape, Path(folder), weights="fp8_block")
        runner = CudaModelRunner(settings, TensorParallel(), RandomTensors())
    for slab in runner.pool.slabs.values():
        slab.normal_()
    runner.warm_up()
    for slab in runner.pool.slabs.values():
        slab.normal_()
    return runner, settings


@torch.inference_mode()
def decode_ms(runner: CudaModelRunner, batch: int, context: int) -> float:
    """A captured step of `batch` different tokens with contexts of `context` tokens in shuffled blocks."""
    runner._bind_graph(batch)
    size = runner.pool.block_size
    per_row = -(-context // size)
    blocks = np.random.default_rng(0).permutation(runner.num_blocks)[: batch * per_row].astype(np.int32)
    last = np.full(batch, (context - 1) % size + 1, np.int32)
    table = PageTable(np.arange(batch + 1, dtype=np.int32) * per_row, blocks, last, np.arange(batch, dtype=np.int32))
    runner.inputs.wait()
    host = runner.inputs.host
    host["token_ids"][:batch] = np.random.default_rng(1).integers(1000, runner.vocab_size, batch)
    host["positions"][:batch] = context - 1
    host["block_ids"][:batch] = blocks.reshape(batch, per_row)[:, -1]
    runner._send(table, np.ones(batch, np.int64), batch)
    runner.inputs.mark_sent()
    runner.paged.expect_decode(batch)
    return graph_ms(lambda: runner._record_decode(batch))


@torch.inference_mode()
def chunk_ms(runner: CudaModelRunner, start: int, count: int) -> float:
    """A chunk of `count` tokens after `start` cached ones."""
    rows, used = runner.rows, -(-(start + count) // runner.pool.block_size)
    rows.token_ids[0, : start + count] = np.random.default_rng(2).integers(1000, runner.vocab_size, start + count)
    rows.num_tokens[0] = rows.prompt_tokens[0] = start + count
    rows.blocks[0, :used] = np.random.default_rng(3).permutation(runner.num_blocks)[:used]
    rows.slots[0] = 0
    step = StepRows(np.array([0]), np.array([start]), np.array([count]), np.array([True]), 0)
    runner.inputs.wait()
    runner.prepare(step)
    return launched_ms(lambda: runner._head(runner.forward(count, runner.inputs.device["wanted"][:1])))


def floor_ms(runner: CudaModelRunner, batch: int, gigabytes_per_s: float) -> float:
    """Least time of a decode step: all weights but experts that nobody chose, read once. Rows of streams and rings are
    few beside them."""
    model = runner.cuda_model
    assert isinstance(model, CudaStreamModel)
    experts = sum(layer.mlp.num_bytes for layer in model.layers)
    routed = model.layers[-1].mlp.experts.down.values.shape[0]
    met = 1 - (1 - 6 / routed) ** batch
    return float((model.matrix_bytes - experts * (1 - met) + model.head.weight.nbytes) / gigabytes_per_s / 1e6)


def plain_steps_ms() -> tuple[float, float]:
    """By plain torch in float32: a decode step of PLAIN_ROWS rows and a chunk of PLAIN_CONTEXT tokens, wall clock."""
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as folder:
        settings = settings_of(SHORT_SHAPE, Path(folder), kv_memory_bytes=1 << 30)
        return _steps_ms(ReferenceRunner(settings, TensorParallel(), RandomTensors()))


def own_steps_ms() -> tuple[float, float]:
    """The same steps by kernels in bfloat16."""
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as folder:
        settings = settings_of(SHORT_SHAPE, Path(folder), kv_memory_bytes=1 << 30)
        return _steps_ms(CudaModelRunner(settings, TensorParallel(), RandomTensors()))


def _steps_ms(runner: CudaModelRunner | ReferenceRunner) -> tuple[float, float]:
    count, chunks, steps = PLAIN_CONTEXT, [], []
    blocks = -(-(count + 32) // runner.pool.block_size)
    for row in range(PLAIN_ROWS):
        tokens = np.random.default_rng(row).integers(1000, runner.vocab_size, count).tolist()
        request = NewRequest(
            row=row, token_ids=tokens, prompt_tokens=count, sampling=SamplingParams(temperature=0.0, max_tokens=64),
            block_ids=list(range(row * blocks, (row + 1) * blocks)), sequence_slot=row,
        )  # fmt: skip
        started = time.perf_counter()
        runner.execute(SchedulerOutput(step=row, new_requests=[request], rows=[ScheduledRow(row, 0, count, [], True)]))
        chunks.append(time.perf_counter() - started)
    for step in range(8):
        started = time.perf_counter()
        rows = [ScheduledRow(row, count + step, 1, [], True) for row in range(PLAIN_ROWS)]
        runner.execute(SchedulerOutput(step=100 + step, rows=rows))
        steps.append(time.perf_counter() - started)
    return 1e3 * median(steps[2:]), 1e3 * median(chunks[2:])


def measure(options: Options, machine: str) -> Iterator[Row]:
    """All figures."""
    quick = options.quick

    def row(metric: str, unit: str, value: float, workload: str, *, more: bool = False) -> Row:
        return Row(
            metric=metric, unit=unit, value=value, higher_is_better=more, workload=workload, machine=machine
        )  # fmt: skip

    started = time.perf_counter()
    runner, settings = open_runner(SHAPE)
    yield row("engine start", "s", time.perf_counter() - started, "random weights, kernels, graphs")
    bandwidth = copy_gigabytes_per_s()
    for batch, context in STEPS[:2] if quick else STEPS:
        workload = f"{SHAPE}: {batch} rows at context {context}, captured step"
        metric = f"decode step, batch {batch}, context {context}"
        yield row(metric, "ms", decode_ms(runner, batch, context), workload)
        yield row(f"{metric}: weight floor", "ms", floor_ms(runner, batch, bandwidth), f"at {bandwidth:.0f} GB/s")
    for start, count in CHUNKS[:1] if quick else CHUNKS:
        workload = f"{SHAPE}: {count} tokens after {start} cached ones, one prompt"
        yield row(f"chunk of {count} after {start}", "ms", chunk_ms(runner, start, count), workload)
    engine = Engine(settings, runner)
    for length in PROMPTS[:1] if quick else PROMPTS:
        prompts = random_prompts([length] * 3, runner.vocab_size, length)
        seconds = median([generate(engine, [prompt], [1]).total_s for prompt in prompts][1:])
        workload = f"{SHAPE}: one prompt of {length} tokens in chunks of {CHUNK}, one token, mean of 2"
        yield row(f"prefill, prompt of {length}", "tokens/s", length / seconds, workload, more=True)
    del engine, runner
    gc.collect()
    torch.cuda.empty_cache()
    workload = (
        f"{SHORT_SHAPE}: {PLAIN_ROWS} rows at context {PLAIN_CONTEXT}, wall clock, graphs where there are kernels"
    )
    for name, steps in (("kernels, bfloat16", own_steps_ms), ("plain torch, float32", plain_steps_ms)):
        decode, chunk = steps()
        gc.collect()
        torch.cuda.empty_cache()
        yield row(f"decode step, {name}", "ms", decode, workload)
        yield row(f"chunk of {PLAIN_CONTEXT}, {name}", "ms", chunk, workload)


def run(options: Options) -> list[Row]:
    """One model, all measurements."""
    name = torch.cuda.get_device_name()
    return list(measure(options, f"1 x {name}, torch {torch.__version__}, triton {triton.__version__}"))
