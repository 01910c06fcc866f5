"""A model of GLM-5.2's layers, as many as fit one CUDA device, through the engine: prefill, decode, and their parts.

Weights are random, FP8 with a scale for each 128 x 128 values; latents and indexer keys are bfloat16. Prompts run
through engine and scheduler in this process (wall clock); decode steps at long contexts are captured graphs over blocks
of random latents, shuffled, and a part is what a step takes less without it.
"""

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import triton

from tidemill_bench.benchmarks.gpu_engine import copy_gigabytes_per_s, generate, random_prompts
from tidemill_bench.latent_parts import LatentParts, chunk_parts, decode_parts
from tidemill_bench.options import Options
from tidemill_bench.random_tensors import RandomTensors, write_config
from tidemill_bench.report import Row
from tidemill_engine.cuda.experts import DeviceMoe
from tidemill_engine.cuda.latent_model import CudaLatentModel
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.engine import Engine
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings

SHAPE = "glm-5.2, 9 layers"
CONTEXT_TOKENS = 131_072 + 8192
CHUNK = 8192
STEPS = ((1, 4096), (1, 32_768), (1, 131_072), (16, 4096), (16, 32_768), (16, 131_072), (64, 4096), (64, 32_768))
"""Rows and contexts of decode steps; the last is about what memory holds beside the weights."""
PROMPTS = (8192, 32_768, 131_072)
CHUNKS = ((0, CHUNK), (131_072 - CHUNK, CHUNK))
"""Cached tokens before a chunk, and its tokens."""


def open_runner(context_tokens: int, kv_bytes: int) -> tuple[CudaModelRunner, EngineSettings]:
    """Weights, kernels and graphs."""
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as folder:
        settings = EngineSettings(
            model_dir=str(write_config(SHAPE, Path(folder), context_tokens)),
            device="cuda",
            kv_dtype="bfloat16",
            weights="fp8_block",
            block_size=64,
            kv_memory_bytes=kv_bytes,
            max_num_seqs=64,
            max_num_batched_tokens=CHUNK,
        )
        runner = CudaModelRunner(settings, TensorParallel(), RandomTensors())
    for slab in runner.pool.slabs.values():
        slab.normal_()
    runner.warm_up()
    return runner, settings


def floor_ms(runner: CudaModelRunner, batch: int, context: int, met: float, gigabytes_per_s: float) -> float:
    """Least time of a decode step: what it must read, once, at the copy bandwidth of the device. Of the experts it is
    the share `met`."""
    model = runner.cuda_model
    assert isinstance(model, CudaLatentModel)
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, DeviceMoe)]
    weights = model.matrix_bytes - sum(mlp.num_bytes for mlp in routed) * (1 - met) + model.head.weight.nbytes
    latents, keys = (runner.pool.slabs[name] for name in ("latent", "index"))
    rows = min(context, model._top_k) * latents[0, :, 0, 0].nbytes
    scored = context * keys[0, :, 0, 0].nbytes if context > model._top_k else 0
    return float((weights + batch * (rows + scored)) / gigabytes_per_s / 1e6)


def part_rows(parts: LatentParts, metric: str, workload: str, machine: str) -> Iterator[Row]:
    """The parts of a step, largest first."""
    names = ("attention", "scores", "choice", "experts", "routing", "rest")
    for name in sorted(names, key=lambda name: -getattr(parts, name)):
        yield Row(
            metric=f"{metric}: {name}", unit="ms", value=getattr(parts, name), higher_is_better=False,
            workload=f"{workload}; that much less without it", machine=machine,
        )  # fmt: skip


def fp8_score_rows(runner: CudaModelRunner, machine: str, *, quick: bool) -> Iterator[Row]:
    """The same steps where rows are scored by FP8 copies of their keys."""
    by_keys, model = runner.paged, runner.cuda_model
    assert isinstance(model, CudaLatentModel)
    model.fp8_scores = True
    runner.paged = model.open_attention(runner.pool, "")  # type: ignore[arg-type]
    runner.paged.open(runner.inputs)
    for follow in runner.pool.followers:  # type: ignore[attr-defined]
        for first in range(0, runner.num_blocks, 1024):
            end = min(first + 1024, runner.num_blocks)
            follow(torch.arange(first, end, dtype=torch.int32, device="cuda"))
    for batch, context in STEPS[:1] if quick else ((1, 131_072), (16, 131_072), (64, 32_768)):
        parts = decode_parts(runner, batch, context)
        metric = f"decode step, batch {batch}, context {context}, FP8 scores"
        yield Row(
            metric=metric, unit="ms", value=parts.whole, higher_is_better=False, workload=metric, machine=machine
        )  # fmt: skip
        yield from part_rows(parts, metric, metric, machine)
    for start, count in CHUNKS[:1] if quick else CHUNKS[1:]:
        parts = chunk_parts(runner, start, count)
        metric = f"chunk of {count} after {start}, FP8 scores"
        yield Row(
            metric=metric, unit="ms", value=parts.whole, higher_is_better=False, workload=metric, machine=machine
        )  # fmt: skip
        yield from part_rows(parts, metric, metric, machine)
    runner.pool.followers.clear()  # type: ignore[attr-defined]
    model.fp8_scores, runner.paged = False, by_keys


def measure(options: Options, machine: str) -> Iterator[Row]:
    """All figures."""
    quick = options.quick
    started = time.perf_counter()
    runner, settings = open_runner(CONTEXT_TOKENS, (8 if quick else 36) << 30)
    ready_s = time.perf_counter() - started
    gc.collect()
    gc.freeze()
    bandwidth = copy_gigabytes_per_s()

    def row(metric: str, unit: str, value: float, workload: str, *, more: bool = False) -> Row:
        return Row(
            metric=metric, unit=unit, value=value, higher_is_better=more, workload=workload, machine=machine
        )  # fmt: skip

    yield row("engine start", "s", ready_s, "random weights, kernels, graphs; imports not counted")
    for batch, context in STEPS[:2] if quick else STEPS:
        parts = decode_parts(runner, batch, context)
        workload = f"{batch} rows at context {context}, captured step"
        metric = f"decode step, batch {batch}, context {context}"
        yield row(metric, "ms", parts.whole, f"{workload}")
        floor = floor_ms(runner, batch, context, parts.met, bandwidth)
        note = f"{workload}; {parts.met:.0%} of the experts, at {bandwidth:.0f} GB/s"
        yield row(f"{metric}: byte floor", "ms", floor, note)
        yield from part_rows(parts, metric, workload, machine)
    for start, count in CHUNKS[:1] if quick else CHUNKS:
        parts = chunk_parts(runner, start, count)
        metric, workload = f"chunk of {count} after {start}", f"{count} tokens after {start} cached ones, one prompt"
        yield row(metric, "ms", parts.whole, workload)
        yield from part_rows(parts, metric, workload, machine)
    yield from fp8_score_rows(runner, machine, quick=quick)
    engine = Engine(settings, runner)
    for length in PROMPTS[:1] if quick else PROMPTS:
        prompts = random_prompts([length] * 3, runner.vocab_size, length)
        seconds = median([generate(engine, [prompt], [1]).total_s for prompt in prompts][1:])
        workload = f"one prompt of {length} tokens in chunks of {CHUNK}, one token, mean of 2"
        yield row(f"prefill, prompt of {length}", "tokens/s", length / seconds, workload, more=True)
    for batch in (1, 16) if quick else (1, 16, 64):
        made = generate(engine, random_prompts([512] * batch, runner.vocab_size, batch), [32] * batch)
        workload = f"{batch} sequences through the engine, 512 in, 32 out, median step, wall clock"
        yield row(f"engine's decode step, batch {batch}", "ms", 1e3 * median(made.decode_steps_s), workload)


def run(options: Options) -> list[Row]:
    """One model, all measurements."""
    name = torch.cuda.get_device_name()
    machine = f"1 x {name}, torch {torch.__version__}, triton {triton.__version__}"
    try:
        return list(measure(options, machine))
    finally:
        gc.unfreeze()
