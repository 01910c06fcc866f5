"""SmolLM2's real weights on CUDA: against transformers in float32, and each weight and KV format against bfloat16.

Text: this repository's ARCHITECTURE.md. The gates are about twice what was measured on an H200 (README.md).
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.real_model]
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from gpu.driver import Driver, all_logits
from gpu.nvfp4 import write_nvfp4
from tokenizers import Tokenizer

from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.smollm2 import convert
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings

TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
NUM_TOKENS = 1024
NUM_GREEDY = 128
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"weights": "fp8"},
    "fp8_block": {"weights": "fp8_block"},
    "int8": {"weights": "int8"},
    "fp8 kv": {"kv_dtype": "float8_e4m3fn"},
    "invariant": {"batch_invariant": True},
}
GATES: dict[str, tuple[float, float, float]] = {
    "fp8": (0.12, 0.05, 0.85),
    "fp8_block": (0.12, 0.05, 0.85),
    "int8": (0.04, 0.02, 0.9),
    "fp8 kv": (0.08, 0.04, 0.85),
    "invariant": (0.02, 0.01, 0.95),
}
"""Relative error of logits, of perplexity, and least share of bfloat16's 128 greedy tokens that are chosen too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return convert(tmp_path_factory.mktemp("home") / "smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text("utf-8")).ids
    assert len(ids) > NUM_TOKENS
    return ids[:NUM_TOKENS]


@pytest.fixture(scope="module")
def reference(folder: Path, text: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    with torch.inference_mode():
        return model(torch.tensor([text], device="cuda")).logits[0].float()


def driver(folder: Path, **fields: Any) -> Driver:
    common = {"kv_dtype": "bfloat16"} | fields
    settings = EngineSettings(
        model_dir=str(folder), device="cuda", block_size=16, num_blocks=256, max_num_seqs=8,
        max_num_batched_tokens=2048, **common,
    )  # fmt: skip
    return Driver(CudaModelRunner(settings, TensorParallel()))


def perplexity(logits: torch.Tensor, text: list[int]) -> float:
    targets = torch.tensor(text[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), targets).exp())


def relative(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out - reference).norm() / reference.norm())


def test_logits_are_transformers(folder: Path, text: list[int], reference: torch.Tensor) -> None:
    out = all_logits(driver(folder), text)
    errors = (out - reference).abs().amax(-1)
    top = reference.topk(2, dim=-1).values
    sure = top[:, 0] - top[:, 1] > 2 * errors
    figures = {"relative": relative(out, reference), "sure": int(sure.sum()), "largest": float(errors.max())}
    figures["perplexity"], figures["reference"] = perplexity(out, text), perplexity(reference, text)
    print("smollm2 bf16 against float32", figures)
    assert figures["relative"] < 0.02
    assert figures["sure"] > NUM_TOKENS // 2
    assert torch.equal(out.argmax(-1)[sure], reference.argmax(-1)[sure])
    assert abs(figures["perplexity"] / figures["reference"] - 1) < 0.01


def test_greedy_tokens_are_transformers_where_it_is_sure(folder: Path, text: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    ours = driver(folder)
    ours.add(0, text[:100])
    ours.prefill(0)
    tokens = [*text[:100], *ours.generate([0], NUM_GREEDY)[0]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device="cuda")).logits[0, 99:-1].float()
    top = logits.topk(2, dim=-1).values
    sure = top[:, 0] - top[:, 1] > 0.5
    assert int(sure.sum()) > NUM_GREEDY // 2
    assert torch.equal(logits.argmax(-1)[sure].cpu(), torch.tensor(tokens[100:])[sure.cpu()])


@pytest.mark.parametrize("name", FORMATS)
def test_formats_keep_to_their_gates(folder: Path, text: list[int], name: str) -> None:
    check_gate(driver(folder), driver(folder, **FORMATS[name]), text, name)


def test_nvfp4_rounded_to_fp8_by_block_keeps_to_its_gate(folder: Path, text: list[int], tmp_path: Path) -> None:
    """Against the same NVFP4 values in bfloat16."""
    packed = write_nvfp4(folder, tmp_path / "nvfp4")
    check_gate(driver(packed), driver(packed, weights="fp8_block"), text, "fp8_block")


def check_gate(plain: Driver, own: Driver, text: list[int], name: str) -> None:
    # Chunks of a prompt read what the pool holds, whole prompts their own projection.
    reference, out = all_logits(plain, text, chunk=256), all_logits(own, text, chunk=256)
    plain.add(1, text[:100])
    plain.prefill(1)
    tokens = [*text[:100], *plain.generate([1], NUM_GREEDY)[0]]
    own.free_blocks = list(range(own.runner.num_blocks))
    agreement = (all_logits(own, tokens, chunk=64)[99:-1].argmax(-1).cpu() == torch.tensor(tokens[100:])).float().mean()
    figures = (relative(out, reference), perplexity(out, text) / perplexity(reference, text) - 1, float(agreement))
    print("smollm2", name, "against bf16: logits", *(f"{figure:.5f}" for figure in figures))
    most_error, most_perplexity, least_agreement = GATES[name]
    assert figures[0] < most_error
    assert abs(figures[1]) < most_perplexity
    assert figures[2] >= least_agreement
