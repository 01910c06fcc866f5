"""The CUDA runner against the CPU runner on small random checkpoints, and against itself on other paths."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from gpu.driver import GREEDY, Driver, all_logits, prompt

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
FORMAT_BOUND = 0.2
"""Relative error of FP8's or INT8's logits to bfloat16's on random weights."""
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


def cuda_driver(model_dir: Path, *, use_graphs: bool = True, **fields: Any) -> Driver:
    runner = CudaModelRunner(settings(model_dir, **(CUDA | fields)), TensorParallel(), use_graphs=use_graphs)
    slab = runner.pool.slabs["kv"]
    slab.view(torch.uint8).fill_(0x7F) if slab.dtype == torch.float8_e4m3fn else slab.fill_(float("nan"))
    return Driver(runner, seed=1)


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
    fields = settings(checkpoint("llama"), **CUDA, batch_invariant=True)
    runner = CudaModelRunner(fields, TensorParallel())
    runner.warm_up()
    ahead, waiting = Engine(fields, runner), Engine(fields, WaitingRunner(runner))  # type: ignore[arg-type]
    first, second = engine_outputs(ahead), engine_outputs(waiting)
    assert [len(tokens) for tokens in first.values()] == [10 + 7 * i for i in range(len(LENGTHS))]
    assert first == second


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


def last_logits(driver: Driver, place: int) -> torch.Tensor:
    """Of the row that was `place`-th in the last step."""
    assert isinstance(driver.runner, CudaModelRunner)
    return driver.runner._logits[place].clone()


def test_batch_invariant_output_depends_on_nothing_else(checkpoint: Callable[[str], Path]) -> None:
    """Bit for bit: alone, in a batch, in chunks, beside prefills, from cached blocks, and recomputed."""
    make = lambda: cuda_driver(checkpoint("llama"), batch_invariant=True)  # noqa: E731
    tokens = prompt(150, seed=9)
    alone = make()
    alone.add(0, tokens)
    alone.prefill(0)
    whole = alone.generate([0], 24)[0]
    bits = last_logits(alone, 0)
    crowd = make()
    for row, length in enumerate(LENGTHS):
        crowd.add(row, prompt(length, seed=row))
        crowd.prefill(row)
    crowd.add(20, tokens)
    for part in (50, 37, 63):
        crowd.step({0: 1, 3: 1, 20: part})
    rows = [*range(len(LENGTHS)), 20]
    assert crowd.generate(rows, 24)[-1] == whole
    assert torch.equal(last_logits(crowd, len(rows) - 1), bits)
    crowd.add(21, tokens, blocks=crowd.blocks[20][:8], computed=128)
    crowd.prefill(21)
    assert crowd.generate([4, 21], 24)[1] == whole
    # What was decoded is computed as a prompt: a preempted request that comes back.
    crowd.add(22, [*tokens, *whole[:10]])
    crowd.prefill(22)
    assert crowd.generate([22], 14)[0] == whole[10:]
    assert torch.equal(last_logits(crowd, 0), bits)


def test_preemption_changes_no_output(checkpoint: Callable[[str], Path]) -> None:
    """The same requests with room for all and with room for few."""
    results = []
    for num_blocks in (256, 30):
        fields = settings(checkpoint("llama"), **CUDA, batch_invariant=True)
        fields = msgspec.structs.replace(fields, num_blocks=num_blocks, admission_headroom_tokens=1)
        engine = Engine(fields, CudaModelRunner(fields, TensorParallel()))
        results.append((engine_outputs(engine), engine.scheduler.load_sample().preemptions_total))
    (roomy, none), (tight, some) = results
    assert none == 0 < some
    assert roomy == tight


@pytest.mark.parametrize("fields", [{"weights": "fp8"}, {"weights": "int8"}, {"kv_dtype": "float8_e4m3fn"}], ids=str)
def test_formats_run_through_graphs_and_chunks(checkpoint: Callable[[str], Path], fields: dict[str, Any]) -> None:
    """Graphs, chunks and decoded tokens stay near the bfloat16 engine on the same tokens."""
    driver = cuda_driver(checkpoint("qwen3"), **fields)
    outputs(driver, LENGTHS, 16)
    tokens = driver.tokens[6]
    plain, own = cuda_driver(checkpoint("qwen3")), cuda_driver(checkpoint("qwen3"), **fields)
    reference, out = all_logits(plain, tokens), all_logits(own, tokens, chunk=40)
    assert float((out - reference).norm() / reference.norm()) < FORMAT_BOUND
    bound = 2 * float((out - reference).abs().max())
    before = reference[len(tokens) - 17 : -1]
    chosen = before.gather(1, torch.tensor(tokens[-16:], device="cuda")[:, None])[:, 0]
    assert bool((chosen >= before.amax(-1) - bound).all())


def test_what_cuda_does_not_run_is_refused_by_name(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailable, match="kv_dtype = 'float32'"):
        start_runner(settings(checkpoint("llama"), device="cuda"), TensorParallel())
    with pytest.raises(CudaUnavailable, match="head_dim 16"):
        start_runner(settings(make_tiny("llama", tmp_path / "tiny"), **CUDA), TensorParallel())


def test_warm_up_leaves_no_trace(checkpoint: Callable[[str], Path]) -> None:
    cold = cuda_driver(checkpoint("llama"), batch_invariant=True)
    fields = settings(checkpoint("llama"), **CUDA, batch_invariant=True)
    warm = Driver(start_runner(fields, TensorParallel()), seed=1)
    warm.runner.warm_up()
    assert outputs(warm, LENGTHS, 8) == outputs(cold, LENGTHS, 8)
