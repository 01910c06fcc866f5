"""Two gloo ranks make the tokens of one, and their pools exchange KV with it through the canonical form."""

import multiprocessing
import secrets
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, ScheduledRow, SchedulerOutput

SAMPLING = SamplingParams(temperature=0.8, seed=9, logprobs=True, top_logprobs=3)
PROMPT = torch.randint(0, 264, (45,), generator=torch.Generator().manual_seed(4)).tolist()
BLOCKS = [5, 2, 9, 11, 3, 7, 1, 0]
# Two processes import torch, on a machine that may do much else.
START_TIMEOUT_S = 300.0


def run_rank(rank: int, group: Path, folder: str, kv_dtype: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    tp = TensorParallel(rank, 2, f"file://{group}")
    runner = ModelRunner(settings_for(folder, kv_dtype), tp)
    tokens, logprobs = steps(runner)
    head_start, head_end = runner.head_range
    kv = runner.pool.gather(BLOCKS, head_start, head_end, sequence_slot=0)
    pipe.send((tokens, logprobs, runner.head_range, kv))
    pipe.recv()
    tp.close()


def settings_for(folder: str, kv_dtype: str = "float32") -> EngineSettings:
    return EngineSettings(model_dir=folder, block_size=16, num_blocks=16, max_num_seqs=2, kv_dtype=kv_dtype)  # type: ignore[arg-type]


def steps(runner: ModelRunner) -> tuple[list[int], list[Any]]:
    """A prompt in two chunks, then eight tokens."""
    request = NewRequest(
        row=1, token_ids=PROMPT, prompt_tokens=45, sampling=SAMPLING, block_ids=BLOCKS, sequence_slot=0
    )
    runner.execute(SchedulerOutput(step=0, new_requests=[request], rows=[ScheduledRow(1, 0, 20, [], False)]))
    tokens, logprobs = [], []
    parts = [(20, 25)] + [(45 + i, 1) for i in range(8)]
    for start, count in parts:
        result = runner.execute(SchedulerOutput(step=1, rows=[ScheduledRow(1, start, count, [], True)]))
        tokens += result.sampled[0].token_ids
        logprobs += result.sampled[0].logprobs
    return tokens, logprobs


def two_ranks(folder: Path, kv_dtype: str) -> list[Any]:
    group = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}.group")
    context = multiprocessing.get_context("spawn")
    results, processes, pipes = [], [], []
    try:
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, group, str(folder), kv_dtype, there))
            process.start()
            processes.append(process)
            pipes.append(here)
        for pipe in pipes:
            assert pipe.poll(START_TIMEOUT_S), "a rank did not finish"
            results.append(pipe.recv())
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
    return results


@pytest.mark.parametrize(
    ("architecture", "overrides", "kv_dtype"),
    [("qwen2", {}, "float32"), ("toy", {"num_hidden_layers": 6}, "bfloat16")],
)
def test_two_ranks_equal_one(
    tiny: Callable[..., Path], architecture: str, overrides: dict[str, Any], kv_dtype: str
) -> None:
    folder = tiny(architecture, **overrides)
    one = ModelRunner(settings_for(str(folder), kv_dtype), TensorParallel())
    tokens, logprobs = steps(one)
    results = two_ranks(folder, kv_dtype)
    assert [result[0] for result in results] == [tokens, tokens]
    assert results[1][1] == [], "followers do not sample"
    for mine, theirs in zip(logprobs, results[0][1], strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3 if kv_dtype == "float32" else 0.1)
    assert [result[2] for result in results] == [(0, 1), (1, 2)]
    # What two ranks hold fits into one pool of another dtype, and the other way round.
    whole = ModelRunner(settings_for(str(folder)), TensorParallel()).pool
    for _, _, (start, end), kv in results:
        whole.scatter(kv, BLOCKS, start, end, kv_dtype, sequence_slot=0)
    mine = ModelRunner(settings_for(str(folder)), TensorParallel()).pool
    mine.scatter(one.pool.gather(BLOCKS, 0, 2, sequence_slot=0), BLOCKS, 0, 2, kv_dtype, sequence_slot=0)
    difference = whole.gather(BLOCKS, 0, 2, sequence_slot=0).view(np.float32) - mine.gather(
        BLOCKS, 0, 2, sequence_slot=0
    ).view(np.float32)
    assert np.abs(difference).max() < (1e-3 if kv_dtype == "float32" else 0.1)


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa"])
def test_ranks_that_hold_all_of_the_kv_equal_one(oracle: Callable[..., Path], name: str) -> None:
    folder = oracle(name)
    one = ModelRunner(settings_for(str(folder)), TensorParallel())
    tokens, logprobs = steps(one)
    kv = one.pool.gather(BLOCKS, 0, 1, sequence_slot=0).view(np.float32)
    results = two_ranks(folder, "float32")
    assert [result[0] for result in results] == [tokens, tokens]
    for mine, theirs in zip(logprobs, results[0][1], strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3)
    assert [result[2] for result in results] == [(0, 1), (0, 1)]
    # A piece may come from either rank: both hold the same bytes.
    assert np.array_equal(results[0][3], results[1][3])
    assert np.abs(results[0][3].view(np.float32) - kv).max() < 1e-3


@pytest.mark.parametrize(
    ("config", "name"),
    [({"num_key_value_heads": 1}, "num_key_value_heads = 1"), ({"intermediate_size": 127}, "intermediate_size = 127")],
)
def test_a_size_that_does_not_divide_is_refused_by_name(
    tiny: Callable[..., Path], config: dict[str, int], name: str
) -> None:
    class SecondOfTwo(TensorParallel):
        """Rank 1 of 2 that never meets its peer."""

        def __init__(self) -> None:
            self.rank, self.size = 1, 2

    folder = tiny("llama", **config)
    with pytest.raises(ValueError, match=f"{name} does not divide by tp_size = 2"):
        ModelRunner(settings_for(str(folder)), SecondOfTwo())
