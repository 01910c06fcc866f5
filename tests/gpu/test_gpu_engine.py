"""The CUDA runner against the CPU runner on small random checkpoints, and against itself on other paths."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from gpu.driver import GREEDY, Driver, prompt

from tidemill_engine.attention.base import ForwardBatch
from tidemill_engine.cuda.batch import read_rows
from tidemill_engine.cuda.requirements import CudaUnavailable
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.engine import Engine
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.messages import RequestKey, Submit
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.runners import start_runner
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import ScheduledRow, SchedulerOutput

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
CPU = {"weights": "fp32", "kv_dtype": "float32"}
CUDA = {"device": "cuda", "kv_dtype": "bfloat16"}
LOGIT_BOUND = 0.03
"""Relative error of bf16 logits over two layers, teacher-forced."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return lambda architecture: make_tiny(architecture, folder / architecture, **SHAPE)


def settings(model_dir: Path, **fields: Any) -> EngineSettings:
    common: dict[str, Any] = {"block_size": 16, "num_blocks": 256, "max_num_seqs": 24, "torch_threads": 4}
    return EngineSettings(model_dir=str(model_dir), **(common | fields))


def cpu_driver(model_dir: Path) -> Driver:
    return Driver(ModelRunner(settings(model_dir, **CPU), TensorParallel()))


def cuda_driver(model_dir: Path, **options: Any) -> Driver:
    runner = CudaModelRunner(settings(model_dir, **CUDA), TensorParallel(), **options)
    runner.pool.slabs["kv"].fill_(float("nan"))
    return Driver(runner, seed=1)


@torch.inference_mode()
def all_logits(driver: Driver, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] of one pass over a prompt on the driver's device; uses row 0."""
    runner = driver.runner
    driver.add(0, token_ids)
    runner.execute(SchedulerOutput(step=0, new_requests=driver._new))
    driver._new = []
    scheduled = [ScheduledRow(0, 0, len(token_ids), [], False)]
    if isinstance(runner, CudaModelRunner):
        runner.prepare(read_rows(scheduled, runner.rows))
        hidden = runner.forward(len(token_ids), None)
        return hidden.float() @ runner.cuda_model.head_weight.float().T
    batch, fresh = runner.rows.batch(scheduled, runner.pool.null_block)
    runner.pool.clear_blocks(torch.from_numpy(fresh))
    parts = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    batch = ForwardBatch(**(parts | {"sample_indices": torch.arange(len(token_ids))}))
    runner.attention.begin(batch)
    return runner.model.logits(runner.model.forward(batch, runner.attention))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_the_cpus_within_bf16_and_greedy_agrees_where_it_must(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    tokens = prompt(300, seed=3)
    reference = all_logits(cpu_driver(checkpoint(architecture)), tokens)
    out = all_logits(cuda_driver(checkpoint(architecture)), tokens).cpu()
    errors = (out - reference).abs().amax(-1)
    relative = float((out - reference).norm() / reference.norm())
    assert relative < LOGIT_BOUND, relative
    top = reference.topk(2, dim=-1).values
    sure = top[:, 0] - top[:, 1] > 2 * errors
    assert int(sure.sum()) > 200
    assert torch.equal(out.argmax(-1)[sure], reference.argmax(-1)[sure])


def outputs(driver: Driver, lengths: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Prompts of these lengths computed one after another, then decoded together."""
    for row, length in enumerate(lengths):
        driver.add(row, prompt(length, seed=row), sampling)
        driver.prefill(row)
    return driver.generate(range(len(lengths)), num_tokens)


LENGTHS = [1, 5, 15, 16, 17, 64, 100, 31, 200, 33, 48]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_give_what_launches_give(checkpoint: Callable[[str], Path], architecture: str) -> None:
    graphs = outputs(cuda_driver(checkpoint(architecture)), LENGTHS, 40)
    eager = outputs(cuda_driver(checkpoint(architecture), use_graphs=False), LENGTHS, 40)
    assert sum(a == b for a, b in zip(graphs, eager, strict=True)) >= len(LENGTHS) - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoded_tokens_are_the_cpus_choice_up_to_bf16(checkpoint: Callable[[str], Path], architecture: str) -> None:
    driver = cuda_driver(checkpoint(architecture))
    outputs(driver, LENGTHS, 32)
    cpu, again = cpu_driver(checkpoint(architecture)), cuda_driver(checkpoint(architecture))
    for row, length in enumerate(LENGTHS):
        tokens = driver.tokens[row]
        for device in (cpu, again):
            device.free_blocks = list(range(device.runner.num_blocks))
        reference, out = all_logits(cpu, tokens), all_logits(again, tokens).cpu()
        bound = 2 * float((out - reference).abs().max())
        before = reference[length - 1 : length + 31]
        chosen = before.gather(1, torch.tensor(tokens[length : length + 32])[:, None])[:, 0]
        assert bool((chosen >= before.amax(-1) - bound).all())


def test_chunks_prefix_hits_and_mixed_steps_change_nothing(checkpoint: Callable[[str], Path]) -> None:
    driver, tokens = cuda_driver(checkpoint("qwen3")), prompt(150, seed=9)
    driver.add(0, tokens)
    driver.prefill(0)
    whole = driver.generate([0], 12)[0]
    driver.add(1, tokens)
    driver.prefill(1, chunk=37)
    assert driver.generate([1], 12)[0] == whole
    driver.add(2, tokens, blocks=driver.blocks[0][:8], computed=128)
    driver.prefill(2)
    assert driver.generate([2], 12)[0] == whole
    driver.add(3, tokens)
    for _ in range(3):
        driver.step({0: 1, 1: 1, 3: 50})
    assert driver.generate([3], 12)[0] == whole


class WaitingRunner:
    """The same runner, but each step is waited for before the next is planned."""

    def __init__(self, runner: CudaModelRunner) -> None:
        for name in ("groups", "num_blocks", "num_snapshots", "context_tokens", "vocab_size", "execute"):
            setattr(self, name, getattr(runner, name))


def engine_outputs(engine: Engine) -> dict[RequestKey, list[int]]:
    """Greedy and drawn requests that come while others decode and end at different steps."""
    tokens: dict[RequestKey, list[int]] = {}
    for i, length in enumerate(LENGTHS):
        key, prompt_ids = RequestKey(f"r{i}"), prompt(length, seed=i)
        sampling = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=10 + 7 * i, top_k=8 * (i == 9))
        submit = {"stage": "whole", "token_ids": prompt_ids, "prompt_tokens": length, "hash_salt": bytes(16)}
        engine.handle(Submit(key=key, sampling=sampling, **submit))  # type: ignore[arg-type]
        tokens[key] = []
        for _ in range(4 if i < len(LENGTHS) - 1 else 400):
            for report in engine.step()[1]:
                for output in getattr(report, "outputs", ()):
                    tokens[output.key] += output.token_ids
    return tokens


def test_running_ahead_changes_no_output(checkpoint: Callable[[str], Path]) -> None:
    fields = settings(checkpoint("llama"), **CUDA)
    runner = CudaModelRunner(fields, TensorParallel())
    runner.warm_up()
    ahead, waiting = Engine(fields, runner), Engine(fields, WaitingRunner(runner))  # type: ignore[arg-type]
    first, second = engine_outputs(ahead), engine_outputs(waiting)
    assert [len(tokens) for tokens in first.values()] == [10 + 7 * i for i in range(len(LENGTHS))]
    assert sum(first[key] == second[key] for key in first) >= len(LENGTHS) - 1


PARAMS = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.1, seed=7,
    logprobs=True, top_logprobs=2, max_tokens=1000, logit_bias={5: 2.0}, min_tokens=4, stop_token_ids=[258],
)  # fmt: skip


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.7, seed=11), PARAMS], ids=["plain", "full"])
def test_draws_follow_the_cpus(checkpoint: Callable[[str], Path], sampling: SamplingParams) -> None:
    cpu = outputs(cpu_driver(checkpoint("llama")), LENGTHS, 8, sampling)
    cuda = outputs(cuda_driver(checkpoint("llama")), LENGTHS, 8, sampling)
    first = sum(a[0] == b[0] for a, b in zip(cpu, cuda, strict=True))
    assert first >= len(LENGTHS) - 2


def test_plain_and_full_sampler_agree_on_the_device(checkpoint: Callable[[str], Path]) -> None:
    plain = SamplingParams(temperature=0.7, seed=11)
    full = SamplingParams(temperature=0.7, seed=11, logprobs=True)
    driver = cuda_driver(checkpoint("llama"))
    a = outputs(driver, LENGTHS, 24, plain)
    b = outputs(cuda_driver(checkpoint("llama")), LENGTHS, 24, full)
    assert sum(x == y for x, y in zip(a, b, strict=True)) >= len(LENGTHS) - 1


def test_what_cuda_does_not_run_is_refused_by_name(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailable, match="kv_dtype = 'float32'"):
        start_runner(settings(checkpoint("llama"), device="cuda"), TensorParallel())
    with pytest.raises(CudaUnavailable, match="head_dim 16"):
        start_runner(settings(make_tiny("llama", tmp_path / "tiny"), **CUDA), TensorParallel())


def test_warm_up_leaves_no_trace(checkpoint: Callable[[str], Path]) -> None:
    cold = cuda_driver(checkpoint("llama"))
    warm = Driver(start_runner(settings(checkpoint("llama"), **CUDA), TensorParallel()), seed=1)
    warm.runner.warm_up()
    assert outputs(warm, LENGTHS, 8) == outputs(cold, LENGTHS, 8)
