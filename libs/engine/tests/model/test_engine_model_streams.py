"""DeepSeek-V4 (window ring, compressed streams, several residual streams) equals transformers, however it is cut."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.oracle_checkpoints import assert_greedy, random_prompt
from transformers import AutoModelForCausalLM

from tidemill_engine.attention import row_store
from tidemill_engine.step import SnapshotCopy

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"rope_parameters": YARN},
    {"scoring_func": "sigmoid", "sliding_window": 40, "index_topk": 3},
    {
        "num_hidden_layers": 2,
        "layer_types": ["compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["moe"] * 2,
        "sliding_window": 16,
    },
]
LOGIT_BOUND = 2e-4
BLOCK = 16
INTERVAL = 64
"""Four rows of the slowest stream."""


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join(variant))
def checkpoint(request: pytest.FixtureRequest, oracle: Callable[..., Path]) -> Path:
    return oracle("deepseek_v4", **request.param)


@pytest.fixture
def plain(oracle: Callable[..., Path]) -> Path:
    return oracle("deepseek_v4")


@pytest.fixture
def start(start_runner: Callable[..., Any]) -> Callable[..., Any]:
    def begin(folder: Path, **settings: Any) -> Any:
        return start_runner(folder, block_size=BLOCK, **({"weights": "fp32"} | settings))

    return begin


@torch.inference_mode()
def logits_of(checkpoint: Path, tokens: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model(torch.tensor([tokens])).logits[0]


def check_greedy(checkpoint: Path, tokens: Sequence[int], known: int) -> None:
    """The reference would have chosen each token after `known`."""
    assert_greedy(logits_of(checkpoint, tokens[:-1])[known - 1 :], tokens[known:], LOGIT_BOUND)


def test_logits_equal_the_reference_across_every_boundary(checkpoint: Path, start: Callable[..., Any]) -> None:
    tokens = random_prompt(100)
    expected = logits_of(checkpoint, tokens)
    driver = start(checkpoint)
    # Around a row of either stream, a block, the window, and all of them by single steps.
    for chunk in (1000, 33, 16, 15, 3, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


@pytest.mark.full
def test_the_published_ratios_and_window_equal_the_reference(
    oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    published = {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "sliding_window": 128,
        "index_topk": 64,
    }
    folder = oracle("deepseek_v4", **published)
    tokens = random_prompt(600)
    expected = logits_of(folder, tokens)
    driver = start_runner(folder, block_size=128, num_blocks=12, weights="fp32")
    for chunk in (1000, 128, 127, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


def test_tiles_of_queries_give_the_same(
    plain: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_prompt(100)
    driver = start(plain)
    whole = driver.all_logits(tokens)
    monkeypatch.setattr(row_store, "TILE_VALUES", 500)
    assert (driver.all_logits(tokens) - whole).abs().max() < LOGIT_BOUND


@pytest.mark.parametrize("weights", ["fp32", "auto"])
def test_greedy_tokens_equal_the_reference_in_a_mixed_batch(
    plain: Path, start: Callable[..., Any], weights: str
) -> None:
    driver = start(plain, weights=weights)
    prompts = {row: random_prompt(length, seed=row) for row, length in ((0, 9), (1, 40), (2, 75))}
    for row, tokens in prompts.items():
        # Slots are not rows: a held request keeps its slot after its row is gone.
        driver.add(row, tokens, sequence_slot=7 - row)
    for parts in [{0: 9}, {0: 1, 1: 25}, {0: 1, 1: 15, 2: 30}, {0: 1, 1: 1, 2: 45}] + [{0: 1, 1: 1, 2: 1}] * 40:
        driver.step(parts)
    for row, tokens in prompts.items():
        check_greedy(plain, driver.tokens[row], len(tokens))


@pytest.mark.full
def test_two_hundred_greedy_tokens_equal_the_reference(plain: Path, start: Callable[..., Any]) -> None:
    driver = start(plain)
    driver.add(0, random_prompt(30))
    driver.generate(0, 200)
    check_greedy(plain, driver.tokens[0], 30)


def test_a_prefix_hit_resumes_from_the_snapshot_at_its_boundary(plain: Path, start: Callable[..., Any]) -> None:
    driver = start(plain)
    assert {spec.snapshot_interval_tokens for spec in driver.runner.groups if spec.kind != "paged"} == {INTERVAL}
    shared, tail = random_prompt(INTERVAL), random_prompt(21, seed=5)
    driver.add(0, shared + random_prompt(30, seed=9))
    driver.step({0: INTERVAL}, [SnapshotCopy(0, 3, False)])
    driver.prefill(0, 11)
    for _ in range(5):
        driver.step({0: 1})
    prefix = driver.blocks[0][: INTERVAL // BLOCK]
    driver.add(1, shared + tail, blocks=prefix, computed=INTERVAL, sequence_slot=5, reset_sequence_state=False)
    driver.step({1: 13}, [SnapshotCopy(5, 3, True)])
    driver.generate(1, 12)
    check_greedy(plain, driver.tokens[1], len(shared + tail))


def test_a_preempted_request_recomputes_from_a_zeroed_slot(plain: Path, start: Callable[..., Any]) -> None:
    driver = start(plain)
    driver.add(0, random_prompt(37))
    driver.generate(0, 10)
    known = list(driver.tokens[0])
    driver.free(0)
    driver.add(2, known, prompt_tokens=37, sequence_slot=0)
    driver.generate(2, 10, chunk=16)
    check_greedy(plain, driver.tokens[2], 37)


@pytest.mark.parametrize("computed", [3, 63, 64, 70])
def test_a_transferred_sequence_goes_on_bit_for_bit(plain: Path, start: Callable[..., Any], computed: int) -> None:
    source, target = start(plain), start(plain)
    target.free_blocks.reverse()
    tokens = random_prompt(computed)
    source.add(0, tokens)
    first = source.generate(0, 1)
    pool = source.runner.pool
    data = pool.gather(source.blocks[0], 0, 1, sequence_slot=0)
    assert data.nbytes == pool.canonical_bytes(len(source.blocks[0]), 0, 1, "float32", True)
    target.add(4, tokens + first, prompt_tokens=computed, reset_sequence_state=False, sequence_slot=6)
    moved = target.blocks[4][: len(source.blocks[0])]
    target.runner.pool.scatter(data, moved, 0, 1, "float32", sequence_slot=6)
    target.computed[4] = computed
    for _ in range(20):
        source.step({0: 1})
        target.step({4: 1})
    assert target.tokens[4] == source.tokens[0]
    grown = pool.gather(source.blocks[0], 0, 1, sequence_slot=0)
    assert (target.runner.pool.gather(target.blocks[4], 0, 1, sequence_slot=6) == grown).all()


def test_bfloat16_kv_stays_near_and_does_not_depend_on_chunks(plain: Path, start: Callable[..., Any]) -> None:
    tokens = random_prompt(90)
    exact = start(plain).all_logits(tokens)
    rounded = start(plain, kv_dtype="bfloat16")
    state = [rounded.runner.pool.slabs[spec.name].dtype for spec in rounded.runner.groups if spec.kind == "state"]
    assert set(state) == {torch.float32}
    whole = rounded.all_logits(tokens)
    # Few tokens may choose other experts or rows.
    assert (whole - exact).abs().median() < 0.05
    assert (whole - rounded.all_logits(tokens, chunk=13)).abs().median() < LOGIT_BOUND


@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_a_block_size_that_cuts_a_row_or_a_snapshot_is_refused(
    plain: Path, start_runner: Callable[..., Any], block_size: int
) -> None:
    with pytest.raises(ValueError, match=f"block_size = {block_size}"):
        start_runner(plain, block_size=block_size)
