"""One engine on one CUDA device, against vLLM 0.26.0's figures on the same kind of device.

Engine and scheduler run in this process as in a rank (garbage is frozen after warm-up), prefix caching included
(prompts share nothing); time is the wall clock from the first submit to the last output. Weights are random,
temperature is 0.6, stop tokens are ignored.
vLLM's figures were measured apart: `LLM.generate` of vLLM 0.26.0 with torch 2.11, one H200, bf16, random weights,
default settings, prefix caching off, 2026-11-30.
"""

import gc
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import torch
import triton

from tidemill_bench.l2_copies import l2_rows
from tidemill_bench.options import Options
from tidemill_bench.random_tensors import RandomTensors, write_config
from tidemill_bench.report import Row
from tidemill_bench.step_parts import step_parts
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.engine import Engine
from tidemill_engine.garbage import settle_garbage
from tidemill_engine.messages import RequestKey, Submit
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.hashing import HASH_BYTES

BASELINE = "vLLM 0.26.0, own measurement 2026-11-30"
VLLM: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {"tokens_per_s": 23_979, "step_1": 1.78, "step_64": 2.95, "step_256": 7.17, "prefill": 33.1},
    "llama-3-8b": {"tokens_per_s": 9_932, "step_1": 4.88, "step_64": 6.59, "step_256": 13.59, "prefill": 206.0},
}
GOALS: dict[str, dict[str, str]] = {
    "qwen3-0.6b": {"tokens_per_s": ">= 30000"},
    "llama-3-8b": {
        "tokens_per_s": ">= 11900", "step_1": "<= 4.0", "step_64": "<= 5.3", "step_256": "<= 9.6", "prefill": "<= 200",
    },
}  # fmt: skip
FORMS: dict[str, dict[str, str]] = {
    "": {},
    " fp8": {"weights": "fp8", "kv_dtype": "float8_e4m3fn"},
    " int8": {"weights": "int8"},
}
"""By what is appended to a shape's name; vLLM was measured in bfloat16 only."""
MEASURED = (("qwen3-0.6b", ""), ("llama-3-8b", ""), ("llama-3-8b", " fp8"), ("llama-3-8b", " int8"))
CONTEXT_TOKENS = 8448
"""8,192 tokens of prompt and room for output."""
TEMPERATURE = 0.6


@dataclass
class Run:
    """What a batch of requests took."""

    total_s: float
    output_tokens: int
    decode_steps_s: list[float]
    """Wall clock of the steps in which every request decodes."""


def generate(engine: Engine, prompts: list[list[int]], max_tokens: list[int]) -> Run:
    """Submits everything at once and steps until all requests have ended."""
    started = time.perf_counter()
    for i, (token_ids, tokens) in enumerate(zip(prompts, max_tokens, strict=True)):
        sampling = SamplingParams(max_tokens=tokens, seed=i, temperature=TEMPERATURE)
        engine.handle(
            Submit(
                key=RequestKey(f"r{i}"),
                stage="whole",
                token_ids=token_ids,
                prompt_tokens=len(token_ids),
                sampling=sampling,
                hash_salt=bytes(HASH_BYTES),
                deadline_s=3600.0,
            )
        )
    ended = outputs = 0
    steps: list[float] = []
    while ended < len(prompts):
        before = time.perf_counter()
        _, reports = engine.step()
        made = 0
        for report in reports:
            for output in getattr(report, "outputs", ()):
                if output.error is not None:
                    raise RuntimeError(f"{output.key}: {output.error}")
                made += len(output.token_ids)
                ended += bool(output.finish)
        outputs += made
        if made == len(prompts) and outputs > len(prompts):
            steps.append(time.perf_counter() - before)
    return Run(time.perf_counter() - started, outputs, steps)


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids that share no prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, vocab_size) for _ in range(length)] for length in lengths]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceTimes:
    """Device time of each decode step, and of the wait between one and the next."""

    def __init__(self, runner: CudaModelRunner) -> None:
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._replay = runner.replay
        runner.replay = self._timed

    def take(self) -> tuple[float, float]:
        """Medians in ms of steps and of waits since the last call; the last steps hold fewer rows and are few."""
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        steps = [begin.elapsed_time(end) for begin, end in marks]
        waits = [end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(marks)]
        return median(steps), median(waits)

    def _timed(self, graph: torch.cuda.CUDAGraph) -> None:
        begin, end = _event(), _event()
        begin.record()
        self._replay(graph)
        end.record()
        self._marks.append((begin, end))


def floor_ms(runner: CudaModelRunner, batch: int, context: int, gigabytes_per_s: float) -> float:
    """Least time of a decode step: each weight and each token's KV read once at the copy bandwidth of the device."""
    num_bytes = (
        runner.cuda_model.matrix_bytes
        + runner.cuda_model.head.weight.nbytes
        + batch * context * runner.kv_bytes_per_token
    )
    return num_bytes / gigabytes_per_s / 1e6


def copy_gigabytes_per_s() -> float:
    """Bytes read and written by a device-to-device copy of 4 GiB."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        begin, end = _event(), _event()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(2 * source.nbytes / median(times[1:]) / 1e6)


def measure(shape: str, form: str, quick: bool, machine: str) -> list[Row]:
    """All figures of one model shape in one form."""
    rows: list[Row] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as folder:
        plain = EngineSettings(
            model_dir=str(write_config(shape, Path(folder), CONTEXT_TOKENS)),
            device="cuda",
            kv_dtype="bfloat16",
            kv_memory_bytes=50 << 30,
            max_num_seqs=256,
            max_num_batched_tokens=8192 + 256,
            max_partial_prefills=64,
        )
        settings = msgspec.structs.replace(plain, **FORMS[form])
        runner = CudaModelRunner(settings, TensorParallel(), RandomTensors())
        runner.warm_up()
        settle_garbage()
    engine = Engine(settings, runner)
    times, bandwidth = DeviceTimes(runner), copy_gigabytes_per_s()
    vllm, goals = ({}, {}) if form else (VLLM[shape], GOALS[shape])
    vocab = runner.vocab_size

    def add(metric: str, unit: str, value: float, key: str, workload: str, more: bool = False) -> None:
        # A short round is another workload.
        known = None if quick else vllm.get(key)
        rows.append(
            Row(metric=f"{shape}{form}: {metric}", unit=unit, value=value, higher_is_better=more, workload=workload,
                machine=machine, baseline=BASELINE if known else None, baseline_value=known, goal=goals.get(key))
        )  # fmt: skip

    add("engine start", "s", time.perf_counter() - started, "start", "weights, kernels, graphs; imports not counted")
    prompts = random_prompts([8192] * 4, vocab, 1)
    prefills = [generate(engine, [prompt], [1]).total_s for prompt in prompts]
    add("prefill of 8192 tokens", "ms", 1e3 * median(prefills[1:]), "prefill", "one prompt, one token, median of 3")
    num_outputs = 32 if quick else 128
    for batch in (1, 64, 256):
        made = generate(engine, random_prompts([512] * batch, vocab, 2 + batch), [num_outputs] * batch)
        device_ms, wait_ms = times.take()
        workload = f"{batch} sequences, 512 in, {num_outputs} out, median step"
        add(f"decode step, batch {batch}", "ms", 1e3 * median(made.decode_steps_s), f"step_{batch}", workload)
        add(f"decode step, batch {batch}, graph", "ms", device_ms, "", f"{workload}, device events")
        add(f"decode step, batch {batch}, wait before it", "ms", wait_ms, "", f"{workload}, device events")
        floor = floor_ms(runner, batch, 576, bandwidth)
        add(f"decode step, batch {batch}, byte floor", "ms", floor, "", f"context 576 at {bandwidth:.0f} GB/s")
        parts = step_parts(runner, batch, 576)
        read, weights = batch * 576 * runner.kv_bytes_per_token, runner.cuda_model.matrix_bytes
        weights += runner.cuda_model.head.weight.nbytes
        alone = "captured step at context 576"
        add(f"decode step, batch {batch}, attention", "ms", parts.attention, "", f"{alone}, that much less without it")
        add(f"decode step, batch {batch}, KV read", "GB/s", read / parts.attention / 1e6, "", alone, more=True)
        add(f"decode step, batch {batch}, products", "ms", parts.products, "", "captured alone, gate included")
        add(f"decode step, batch {batch}, weights read", "GB/s", weights / parts.products / 1e6, "", alone, more=True)
        add(f"decode step, batch {batch}, rest", "ms", parts.rest, "", "what remains of the captured step")
    rng = random.Random(0)
    count = 32 if quick else 256
    inputs = [rng.randint(100, 1024) for _ in range(count)]
    limits = [rng.randint(100, 1024) for _ in range(count)]
    many = generate(engine, random_prompts(inputs, vocab, 0), limits)
    workload = f"{count} sequences, in and out uniform 100-1024 (seed 0): {sum(inputs)} in, {many.output_tokens} out"
    add("output tokens", "tokens/s", many.output_tokens / many.total_s, "tokens_per_s", workload, more=True)
    return rows


def run(options: Options) -> list[Row]:
    """L2's copies, then all shapes one after the other."""
    name = torch.cuda.get_device_name()
    machine = f"1 x {name}, torch {torch.__version__}, triton {triton.__version__}"
    rows = l2_rows(machine)
    for shape, form in MEASURED:
        rows += measure(shape, form, options.quick, machine)
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    return rows
