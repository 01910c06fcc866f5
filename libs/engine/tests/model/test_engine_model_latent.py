"""Latent attention, with and without an indexer, equals Hugging Face transformers in float32, however it is cut."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.oracle_checkpoints import assert_greedy, check_mixed_batch, make_kimi_k25, random_prompt
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tidemill_engine.attention import latent
from tidemill_engine.attention.row_store import strongest
from tidemill_engine.models import latent as latent_models

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "rope_theta": 10000.0,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_parameters": YARN, "attention_bias": True}),
    ("deepseek_v32", {}),
    ("deepseek_v32", {"rope_parameters": YARN, "index_topk": 7}),
    ("glm_moe_dsa", {}),
]
IDS = [f"{name}-{'-'.join(overrides)}" for name, overrides in VARIANTS]
LOGIT_BOUND = 3e-4


@pytest.fixture(params=VARIANTS, ids=IDS)
def checkpoint(request: pytest.FixtureRequest, oracle: Callable[..., Path]) -> Path:
    name, overrides = request.param
    return oracle(name, **overrides)


def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def test_logits_equal_the_reference_whole_chunked_and_step_by_step(
    checkpoint: Path, start_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "PIECE_TOKENS", 20)
    tokens = random_prompt(100)
    expected = reference(checkpoint)(torch.tensor([tokens])).logits[0]
    driver = start_runner(checkpoint, weights="fp32")
    for chunk in (1000, 25, 24, 23, 7, 1):
        actual = driver.all_logits(tokens, chunk=chunk, poison=True)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


@torch.inference_mode()
def test_the_text_part_of_kimi_k25_equals_the_reference(start_runner: Callable[..., Any], tmp_path: Path) -> None:
    folder = make_kimi_k25(tmp_path / "kimi")
    tokens = random_prompt(60)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model(torch.tensor([tokens])).logits[0]
    assert (start_runner(folder).all_logits(tokens, chunk=25) - expected).abs().max() < LOGIT_BOUND


@torch.inference_mode()
def test_greedy_tokens_equal_the_reference_in_a_mixed_batch(checkpoint: Path, start_runner: Callable[..., Any]) -> None:
    # Row 0 grows past the indexer's count while the others are computed in chunks.
    check_mixed_batch(start_runner(checkpoint, weights="auto"), reference(checkpoint), LOGIT_BOUND)


@pytest.mark.full
@torch.inference_mode()
def test_the_published_count_of_selected_tokens_equals_the_reference(
    oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    folder = oracle("glm_moe_dsa", index_topk=2048, max_position_embeddings=4096, num_hidden_layers=4)
    tokens = random_prompt(2200)
    expected = reference(folder)(torch.tensor([tokens])).logits[0]
    driver = start_runner(folder, num_blocks=300, weights="fp32")
    for chunk in (4000, 512):
        actual = driver.all_logits(tokens, chunk=chunk)
        assert (actual - expected).abs().max() < LOGIT_BOUND, f"chunks of {chunk}"


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
@torch.inference_mode()
def test_two_hundred_greedy_tokens_equal_the_reference(
    name: str, oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    driver = start_runner(oracle(name))
    driver.add(0, random_prompt(30))
    made = driver.generate(0, 200, chunk=17)
    logits = reference(oracle(name))(torch.tensor([driver.tokens[0][:-1]])).logits[0, 29:]
    assert_greedy(logits, made, LOGIT_BOUND)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_moved_and_shared_blocks_give_the_same_bits(
    name: str, oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    folder = oracle(name)
    source, target = start_runner(folder, weights="fp32"), start_runner(folder, weights="fp32")
    target.free_blocks.reverse()
    shared, tail = random_prompt(64), random_prompt(21, seed=5)
    for driver in (source, target):
        driver.add(0, shared + tail)
    source.step({0: 64})
    expected = source.generate(0, 12)

    # Blocks of another request's prefix, in other places of another pool, through the canonical form.
    prefix = source.blocks[0][: 64 // source.block_size]
    data = source.runner.pool.gather(prefix, 0, 1)
    assert data.nbytes == source.runner.pool.canonical_bytes(len(prefix), 0, 1, "float32", False)
    places = target.blocks[0][: len(prefix)]
    target.runner.pool.scatter(data, places, 0, 1, "float32")
    assert (target.runner.pool.gather(places, 0, 1) == data).all()
    target.computed[0] = 64
    assert target.generate(0, 12) == expected
    target.add(1, shared + tail, blocks=places, computed=64)
    assert target.generate(1, 12) == expected


@torch.inference_mode()
def test_bfloat16_kv_stays_near_and_does_not_depend_on_chunks(
    oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    folder = oracle("deepseek_v3")
    tokens = random_prompt(90)
    exact = start_runner(folder, weights="fp32").all_logits(tokens)
    rounded = start_runner(folder, weights="fp32", kv_dtype="bfloat16")
    whole = rounded.all_logits(tokens)
    # Few tokens may choose other experts.
    assert (whole - exact).abs().median() < 0.02
    assert (whole - rounded.all_logits(tokens, chunk=13)).abs().max() < LOGIT_BOUND


def logits_changed_by(folder: Path, start_runner: Callable[..., Any], change: Callable[[Any], None]) -> float:
    """How far the logits move from the reference when the loaded model is changed."""
    tokens = random_prompt(100)
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([tokens])).logits[0]
    driver = start_runner(folder, weights="fp32")
    assert (driver.all_logits(tokens) - expected).abs().max() < LOGIT_BOUND
    change(driver.runner.model)
    # Below its count the indexer chooses nothing, and no fault of it can be seen.
    actual = driver.all_logits(tokens)
    assert (actual[:24] - expected[:24]).abs().max() < LOGIT_BOUND
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_other_rotation_of_the_indexer_would_be_seen(
    name: str, oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    def change(model: Any) -> None:
        for layer in model.layers:
            if layer.indexer is not None:
                shape = layer.indexer.shape
                layer.indexer.shape = dataclasses.replace(shape, interleaved=not shape.interleaved)

    assert logits_changed_by(oracle(name), start_runner, change) > 100 * LOGIT_BOUND


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_another_epsilon_of_the_key_norm_would_be_seen(
    name: str, oracle: Callable[..., Path], start_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        monkeypatch.setattr(latent_models, "INDEX_EPS", 1e-5)

    assert logits_changed_by(oracle(name), start_runner, change) > 100 * LOGIT_BOUND


def test_another_schedule_of_shared_indices_would_be_seen(
    oracle: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    folder = oracle("glm_moe_dsa")
    owners = start_runner(folder).runner.model.layers
    assert [layer.indexer is not None for layer in owners] == [True, True, True, False, True, False]
    [group] = [spec for spec in start_runner(folder).runner.groups if spec.name == "index"]
    assert group.layers == (0, 1, 2, 4)

    def change(model: Any) -> None:
        # Layer 4 reuses what layer 2 chose.
        model.layers[4].indexer = None

    assert logits_changed_by(folder, start_runner, change) > 100 * LOGIT_BOUND


def test_of_equal_scores_the_earlier_rows_are_taken() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0], [5.0, float("-inf"), 1.0, 0.0, 4.0]])
    assert strongest(scores, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 2, 4]]
    wider = torch.cat([scores, torch.full((3, 7), float("-inf"))], dim=1)
    assert strongest(wider, 3).tolist() == strongest(scores, 3).tolist()
