"""SmolLM2 from its GGUF: the conversion, and log-probabilities that a wrong Q/K permutation does not give.

The oracle values were made with bfloat16 weights in float32 arithmetic, by Hugging Face transformers and by vLLM alike.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tidemill_engine.loading.smollm2 import convert, halves_from_pairs
from tidemill_engine.sampling_params import SamplingParams

pytestmark = pytest.mark.real_model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TOP = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3)
SENTENCE = "The capital of France is Paris."
SENTENCE_LOGPROBS = [-11.5498, -0.3396, -2.4214, -0.4494, -0.2606, -0.3880]


def chat(question: str) -> str:
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return turns + "<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def smollm2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("smollm2") / request.param, request.param)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def sentence_logprobs(driver: Any, tokenizer: Tokenizer, chunk: int = 100) -> list[float]:
    ids = tokenizer.encode(SENTENCE).ids
    logprobs = torch.log_softmax(driver.all_logits(ids, chunk=chunk, poison=True), dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]


def test_the_conversion_keeps_configuration_template_and_special_tokens(smollm2: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    template = (smollm2 / "chat_template.jinja").read_text()
    assert SYSTEM in template
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"] == template
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 49152
    assert tokenizer.token_to_id("<|im_end|>") == 2
    # Every digit is a token of its own, other numerals included; text comes back as it was.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024").ids] == ["2", "0", "2", "4"]
    for text in ("١٢٣ ² ½", "Grüße 世界 🙂\n\tif x:", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == 272
        assert str(file.get_tensor("model.norm.weight").dtype) == f"torch.{smollm2.name}"


def test_the_next_token_of_a_chat_has_the_oracles_logprobs(
    smollm2: Path, tokenizer: Tokenizer, start_runner: Callable[..., Any]
) -> None:
    ids = tokenizer.encode(chat("Say hi in three words.")).ids
    assert len(ids) == 36
    driver = start_runner(smollm2, block_size=16)
    driver.add(0, ids, TOP)
    _, _, top_ids, top = driver.prefill(0, chunk=20).logprobs[0]
    assert [tokenizer.decode([i]) for i in top_ids] == ["S", "A", "Hi"]
    # The float32 folder holds the GGUF's own values, which bfloat16 rounds.
    assert top == pytest.approx([-3.0231, -3.1080, -3.4102], abs=2e-3 if smollm2.name == "bfloat16" else 0.05)


def test_a_sentence_has_the_oracles_logprobs_and_the_wrong_permutation_has_not(
    smollm2: Path, tokenizer: Tokenizer, start_runner: Callable[..., Any]
) -> None:
    bound = 1e-3 if smollm2.name == "bfloat16" else 0.05
    driver = start_runner(smollm2, block_size=16)
    for chunk in (100, 3):
        assert sentence_logprobs(driver, tokenizer, chunk) == pytest.approx(SENTENCE_LOGPROBS, abs=bound)
    plain = start_runner(smollm2, block_size=16, weights="fp32")
    assert sentence_logprobs(plain, tokenizer) == pytest.approx(SENTENCE_LOGPROBS, abs=bound)
    for layer in plain.runner.model.layers:
        weight = layer.attention.qkv.weight
        weight[:576] = pairs_from_halves(weight[:576], 9)
        weight[576:768] = pairs_from_halves(weight[576:768], 3)
    wrong = sentence_logprobs(plain, tokenizer)
    assert abs(np.mean(wrong) - np.mean(SENTENCE_LOGPROBS)) > 0.2


@pytest.mark.full
@pytest.mark.parametrize("smollm2", ["float32"], indirect=True)
@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers_whole_chunked_with_hits_and_in_a_mixed_batch(
    smollm2: Path, start_runner: Callable[..., Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    shared = random_tokens(64, seed=5)
    prompts = {0: random_tokens(5, seed=2), 1: shared + random_tokens(9, seed=6), 2: shared + random_tokens(20, seed=7)}
    expected = model(torch.tensor([prompts[2]])).logits[0]
    driver = start_runner(smollm2, block_size=16)
    for chunk in (1000, 17):
        difference = (driver.all_logits(prompts[2], chunk=chunk, poison=True) - expected).abs().max()
        assert difference < 2e-3, f"chunks of {chunk}"
    for row in (0, 1):
        driver.add(row, prompts[row], TOP)
    driver.step({0: 5, 1: 40})
    driver.step({0: 1, 1: 33})
    driver.add(2, prompts[2], TOP, blocks=driver.blocks[1][:4], computed=64)
    for count in (20, *[1] * 9):
        driver.step({0: 1, 1: 1, 2: count})
    for row, prompt in prompts.items():
        tokens = driver.tokens[row]
        assert len(tokens) >= len(prompt) + 10
        choices = model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert tokens[len(prompt) :] == choices[len(prompt) - 1 : -1], f"row {row}"


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 49152, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_form_of_the_weights_is_as_near_to_the_plain_path_as_rounding_allows(
    smollm2: Path, tokenizer: Tokenizer, start_runner: Callable[..., Any]
) -> None:
    exact = "bf16" if smollm2.name == "bfloat16" else "q4_1"
    ids = tokenizer.encode(chat("Name three fruits and say why they are healthy.")).ids
    plain = start_runner(smollm2, weights="fp32").all_logits(ids)
    driver = start_runner(smollm2)
    assert driver.runner.backend.rsplit("/", 1)[1] == exact
    assert (driver.all_logits(ids) - plain).abs().max() < 2e-3
    assert (driver.all_logits(ids, chunk=7) - plain).abs().max() < 2e-3


def test_greedy_answers_are_sensible_and_end(
    smollm2: Path, tokenizer: Tokenizer, start_runner: Callable[..., Any]
) -> None:
    driver = start_runner(smollm2)
    ids = tokenizer.encode(chat("What is the capital of France?")).ids
    driver.add(0, ids)
    driver.prefill(0)
    while driver.tokens[0][-1] != 2 and len(driver.tokens[0]) < len(ids) + 20:
        driver.step({0: 1})
    assert tokenizer.decode(driver.tokens[0][len(ids) :]) == "The capital of France is Paris."


def test_bfloat16_kv_moves_logits_little_and_no_clear_choice(
    smollm2: Path, tokenizer: Tokenizer, start_runner: Callable[..., Any]
) -> None:
    ids = tokenizer.encode(chat("Name three fruits.") + "Sure! Apples, bananas and oranges are three fruits.").ids
    plain = start_runner(smollm2).all_logits(ids)
    rounded = start_runner(smollm2, kv_dtype="bfloat16").all_logits(ids)
    error = float((rounded - plain).abs().max())
    assert error < 1.0
    gap = plain.topk(2).values.diff(dim=-1).abs()[:, 0]
    clear = gap > 2 * error
    assert clear.any()
    assert torch.equal(rounded.argmax(-1)[clear], plain.argmax(-1)[clear])


def pairs_from_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of halves_from_pairs."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).clone()


def test_the_permutation_takes_pairs_to_halves() -> None:
    weight = np.arange(8.0)[:, None]
    assert halves_from_pairs(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert math.isclose(
        float(np.abs(pairs_from_halves(torch.from_numpy(halves_from_pairs(weight, 2)), 2).numpy() - weight).max()), 0
    )
