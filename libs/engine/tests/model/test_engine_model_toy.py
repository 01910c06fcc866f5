"""The toy architecture with paged, window and state groups equals a naive recompute, however it is cut or moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.naive_toy import NaiveToy

from tidemill_engine.step import SnapshotCopy

BOUND = 2e-4


@pytest.fixture
def toy(tiny: Callable[..., Path]) -> Path:
    return tiny("toy", num_hidden_layers=6)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_equal_the_naive_recompute_for_every_chunk_size(toy: Path, start_runner: Callable[..., Any]) -> None:
    tokens = prompt(130)
    expected = NaiveToy(toy).logits(tokens)
    driver = start_runner(toy)
    for chunk in (1000, 50, 24, 7, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < BOUND, f"chunks of {chunk}"


def test_greedy_generation_in_a_mixed_batch_equals_the_naive_recompute(
    toy: Path, start_runner: Callable[..., Any]
) -> None:
    driver = start_runner(toy)
    naive = NaiveToy(toy)
    prompts = {row: prompt(length, seed=row) for row, length in ((0, 9), (1, 40), (2, 75))}
    for row, tokens in prompts.items():
        # Slots are not rows: a held request keeps its slot after its row is gone.
        driver.add(row, tokens, sequence_slot=7 - row)
    for parts in [{0: 9}, {0: 1, 1: 25}, {0: 1, 1: 15, 2: 30}, {0: 1, 1: 1, 2: 45}] + [{0: 1, 1: 1, 2: 1}] * 30:
        driver.step(parts)
    for row, tokens in prompts.items():
        made = driver.tokens[row][len(tokens) :]
        assert made == naive.greedy(tokens, len(made))


def test_a_prefix_hit_resumes_from_the_snapshot_at_its_boundary(toy: Path, start_runner: Callable[..., Any]) -> None:
    driver = start_runner(toy)
    shared, tail = prompt(64), prompt(21, seed=5)
    driver.add(0, shared + prompt(30, seed=9))
    driver.step({0: 64}, [SnapshotCopy(0, 3, False)])
    driver.prefill(0, 11)
    for _ in range(5):
        driver.step({0: 1})
    prefix_blocks = driver.blocks[0][: 64 // driver.block_size]
    driver.add(1, shared + tail, blocks=prefix_blocks, computed=64, sequence_slot=5, reset_sequence_state=False)
    driver.step({1: 13}, [SnapshotCopy(5, 3, True)])
    assert driver.generate(1, 12) == NaiveToy(toy).greedy(shared + tail, 12)


def test_a_preempted_request_recomputes_from_a_zeroed_slot(toy: Path, start_runner: Callable[..., Any]) -> None:
    driver = start_runner(toy)
    tokens = prompt(37)
    driver.add(0, tokens)
    before = driver.generate(0, 10)
    known = list(driver.tokens[0])
    driver.free(0)
    driver.add(2, known, prompt_tokens=len(tokens), sequence_slot=0)
    after = driver.generate(2, 10, chunk=16)
    assert before + after == NaiveToy(toy).greedy(tokens, 20)


@pytest.mark.parametrize("computed", [37, 64, 70])
def test_a_transferred_sequence_goes_on_where_it_was(
    toy: Path, start_runner: Callable[..., Any], computed: int
) -> None:
    source, target = start_runner(toy), start_runner(toy)
    target.free_blocks.reverse()
    tokens = prompt(computed)
    source.add(0, tokens)
    first = source.generate(0, 1)
    data = source.runner.pool.gather(source.blocks[0], 0, 2, sequence_slot=0)
    assert data.nbytes == source.runner.pool.canonical_bytes(len(source.blocks[0]), 0, 2, "float32", True)
    target.add(4, tokens + first, prompt_tokens=computed, reset_sequence_state=False, sequence_slot=6)
    moved = target.blocks[4][: len(source.blocks[0])]
    target.runner.pool.scatter(data, moved, 0, 2, "float32", sequence_slot=6)
    target.computed[4] = computed
    assert first + target.generate(4, 15) == NaiveToy(toy).greedy(tokens, 16)


def test_bfloat16_kv_stays_near_the_naive_recompute(toy: Path, start_runner: Callable[..., Any]) -> None:
    tokens = prompt(100)
    expected = NaiveToy(toy).logits(tokens)
    driver = start_runner(toy, kv_dtype="bfloat16")
    whole = driver.all_logits(tokens)
    chunked = driver.all_logits(tokens, chunk=9)
    assert (whole - expected).abs().max() < 0.5
    assert (whole - chunked).abs().max() < 0.2
