"""Block-scaled checkpoints stand for the values that transformers reads from them, under every name they may have."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tidemill_engine.loading import outline
from tidemill_engine.loading.checkpoint import INDEX_NAME, Checkpoint
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.quantised import unpack_fp4

LOGIT_BOUND = 2e-4
E8M0 = torch.float8_e8m0fnu
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def block_scales(matrix: torch.Tensor, rows: int, columns: int, top: float) -> torch.Tensor:
    """Powers of two that bring each block below `top`."""
    height, width = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    padded = torch.zeros(height * rows, width * columns)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    largest = padded.view(height, rows, width, columns).abs().amax(dim=(1, 3))
    return 2.0 ** torch.ceil(torch.log2(largest / top))


def spread(scales: torch.Tensor, shape: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def to_fp8(matrix: torch.Tensor, rows: int = 128, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scales(matrix, rows, columns, 448.0)
    return (matrix / spread(scales, matrix.shape, rows, columns)).to(torch.float8_e4m3fn), scales


def to_fp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scales(matrix, 1, 32, 6.0)
    scaled = matrix / spread(scales, matrix.shape, 1, 32)
    codes = (scaled[..., None] - FP4_VALUES).abs().argmin(dim=-1).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scales


def to_nvfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed values, scales of 16 values of a row, the factor of all scales, and what they stand for."""
    largest = matrix.view(matrix.shape[0], -1, 16).abs().amax(-1)
    factor = largest.max() / (6.0 * 448.0)
    scales = (largest / 6.0 / factor).to(torch.float8_e4m3fn)
    spread_out = (scales.float() * factor).repeat_interleave(16, 1)
    codes = (matrix / spread_out)[..., None].sub(FP4_VALUES).abs().argmin(dim=-1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, factor, FP4_VALUES[codes.long()] * spread_out


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As transformers reads it."""
    return Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)


@pytest.mark.parametrize("kind", ["fp8-float", "fp8-e8m0", "fp8-bytes", "fp4-e8m0"])
def test_values_and_parts_of_them_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    matrix = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    values, scales = to_fp4(matrix) if kind.startswith("fp4") else to_fp8(matrix)
    if kind == "fp8-float":
        scales = scales * 1.37
    elif kind == "fp8-bytes":
        scales = scales.to(E8M0).view(torch.uint8)
    else:
        scales = scales.to(E8M0)
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    expected = dequantised(values, scales)
    checkpoint = Checkpoint(tmp_path)
    whole = checkpoint.take("a.weight", (256, 384))
    # Nothing is rounded where scales are powers of two, so half the bytes hold it.
    assert whole.dtype == (torch.float32 if kind == "fp8-float" else torch.bfloat16)
    assert torch.equal(whole.float(), expected)
    rows = checkpoint.take("a.weight", (256, 384), start=100, end=210)
    assert torch.equal(rows.float(), expected[100:210])
    columns = checkpoint.take("a.weight", (256, 384), axis=1, start=98, end=330)
    assert torch.equal(columns.float(), expected[:, 98:330])


def nvfp4_tensors(name: str, matrix: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As ModelOpt or compressed-tensors writes it, and what it stands for."""
    values, scales, factor, exact = to_nvfp4(matrix)
    if form == "modelopt":
        written = {name: values, f"{name}_scale": scales, f"{name}_scale_2": factor}
    else:
        written = {f"{name}_packed": values, f"{name}_scale": scales, f"{name}_global_scale": 1 / factor[None]}
    return written, exact


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_nvfp4_has_a_scale_for_sixteen_values_and_a_factor_for_all(tmp_path: Path, form: str) -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    tensors, exact = nvfp4_tensors("a.weight", matrix, form)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert "a.weight" in checkpoint
    whole = checkpoint.take("a.weight", (48, 96))
    assert torch.allclose(whole, exact, rtol=1e-6, atol=0)
    assert float((whole - matrix).norm() / matrix.norm()) < 0.12
    assert torch.equal(checkpoint.take("a.weight", (48, 96), axis=1, start=18, end=70), whole[:, 18:70])
    assert torch.equal(checkpoint.take("a.weight", (48, 96), start=5, end=9), whole[5:9])
    assert outline.Outline(tmp_path).take("a.weight", (48, 96)).shape == (48, 96)


def test_nvfp4_without_its_factor_is_refused(tmp_path: Path) -> None:
    tensors, _ = nvfp4_tensors("a.weight", torch.ones(48, 96), "modelopt")
    del tensors["a.weight_scale_2"]
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (Checkpoint(tmp_path), outline.Outline(tmp_path)):
        with pytest.raises(CheckpointError, match=r"neither a\.weight_scale_2 nor .* is there, the factor"):
            source.take("a.weight", (48, 96))


@pytest.mark.parametrize("shape", [[], [1], [2, 2, 1]])
def test_scales_that_are_not_one_for_each_block_are_refused(tmp_path: Path, shape: list[int]) -> None:
    tensors = {"a.weight": torch.ones(256, 256).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(shape)}
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (Checkpoint(tmp_path), outline.Outline(tmp_path)):
        with pytest.raises(CheckpointError, match=r"a\.weight_scale has shape .*, expected a scale for each block"):
            source.take("a.weight", (256, 256))


@torch.inference_mode()
@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_an_nvfp4_checkpoint_equals_its_dequantised_copy(
    tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path, form: str
) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    shutil.copytree(tiny("llama"), plain)
    shutil.copytree(plain, packed)
    exact, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in exact.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        written, exact[name] = nvfp4_tensors(name, tensor.float(), form)
        stored |= written
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    kind = {"quant_algo": "NVFP4"} if form == "modelopt" else {"format": "nvfp4-pack-quantized"}
    config["quantization_config"] = {"quant_method": form, **kind}
    (packed / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, out = (start_runner(folder, weights="fp32").all_logits(tokens) for folder in (plain, packed))
    assert (out - expected).abs().max() < LOGIT_BOUND
    assert outline.summarise(packed).reason == ""


def test_the_last_block_may_be_cut_off(tmp_path: Path) -> None:
    matrix = torch.randn(72, 200, generator=torch.Generator().manual_seed(0))
    values, scales = to_fp8(matrix)
    assert scales.shape == (1, 2)
    save_file({"a.weight": values, "a.scale": scales}, tmp_path / "model.safetensors")
    expected = values.float() * spread(scales, matrix.shape, 128, 128)
    assert torch.equal(Checkpoint(tmp_path).take("a.weight", (72, 200)).float(), expected)


def test_each_byte_holds_two_values_the_even_column_low() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    values = unpack_fp4(codes)[0]
    assert torch.equal(values[0::2], FP4_VALUES.repeat(16))
    assert torch.equal(values[1::2], FP4_VALUES.repeat_interleave(16))


@pytest.mark.parametrize(
    ("tensors", "shape", "message"),
    [
        ({"a.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}, (4, 8), r"a\.weight_scale_inv, the scales of"),
        (
            {"a.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn), "a.scale": torch.ones(3, 1)},
            (4, 8),
            r"a\.weight: 3 scales do not fit 4 values",
        ),
        ({"a.weight": torch.zeros(4, 8, dtype=torch.int8), "a.scale": torch.ones(4, 1)}, (4, 8), "has shape"),
        ({"b.weight": torch.zeros(4, 8)}, (4, 8), r"a\.weight is missing"),
    ],
)
def test_what_is_missing_or_misshaped_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], shape: tuple[int, int], message: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path).take("a.weight", shape)
    with pytest.raises(CheckpointError, match=message):
        outline.Outline(tmp_path).take("a.weight", shape)


NATIVE_NAMES = (
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.norm.", "norm."),
    (".attn.norm.", ".attn.kv_norm."),
)


def native(name: str) -> str:
    """The name in the developer's own checkpoint of what transformers writes."""
    for written, own in NATIVE_NAMES:
        name = name.replace(written, own)
    return name


@torch.inference_mode()
def test_a_native_checkpoint_with_fp8_attention_and_fp4_experts_equals_its_dequantised_copy(
    oracle: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path
) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    shutil.copytree(oracle("deepseek_v4"), plain)
    shutil.copytree(plain, packed)
    exact, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in exact.items():
        own = native(name)
        is_expert = ".experts." in name
        is_attention = name.endswith(("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight"))
        if not (is_expert or is_attention) or "compressor" in name:
            stored[own] = tensor
            continue
        values, scales = to_fp4(tensor) if is_expert else to_fp8(tensor)
        stored |= {own: values, own.replace(".weight", ".scale"): scales.to(E8M0)}
        exact[name] = dequantised(values, scales.to(E8M0))
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    (packed / "model.safetensors").unlink()
    # In shards, as such a checkpoint comes.
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(stored))}
    for shard in set(weight_map.values()):
        save_file({name: stored[name] for name, at in weight_map.items() if at == shard}, packed / shard)
    (packed / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))

    tokens = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    expected = model(torch.tensor([tokens])).logits[0]
    for weights in ("fp32", "auto"):
        driver = start_runner(packed, weights=weights, block_size=16)
        assert (driver.all_logits(tokens) - expected).abs().max() < LOGIT_BOUND
    assert outline.summarise(packed).reason == ""


def test_loading_holds_few_tensors_of_the_file_at_a_time(
    oracle: Callable[..., Path], start_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, peak, total = 0, 0, 0
    read = Checkpoint._read

    def released(size: int) -> None:
        nonlocal live
        live -= size

    def counted(self: Checkpoint, *where: Any) -> torch.Tensor:
        nonlocal live, peak, total
        tensor = read(self, *where)
        live, total = live + tensor.nbytes, total + tensor.nbytes
        peak = max(peak, live)
        weakref.finalize(tensor, released, tensor.nbytes)
        return tensor

    monkeypatch.setattr(Checkpoint, "_read", counted)
    folder = oracle("deepseek_v3", num_hidden_layers=6)
    driver = start_runner(folder, weights="auto")
    embedding = driver.runner.model.embeddings.table.nbytes
    matrix = 96 * 64 * 4
    assert peak - embedding < 6 * matrix < total / 8


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_an_outline_tells_what_a_folder_holds(name: str, oracle: Callable[..., Path]) -> None:
    folder = oracle(name)
    summary = outline.summarise(folder)
    assert summary.reason == ""
    assert summary.context_tokens == 1024
    assert summary.weight_bytes == (folder / "model.safetensors").stat().st_size
    per_token = {
        "qwen3_moe": 3 * 2 * 2 * 16,
        "deepseek_v3": 3 * (32 + 8),
        "glm_moe_dsa": 6 * (32 + 8) + 4 * 16,
        "deepseek_v4": 2 * (32 + 16) // 4 + 2 * 32 // 16,
    }
    if name in per_token:
        assert summary.kv_bytes_per_token == 2 * per_token[name]
    assert (summary.kv_bytes_per_sequence > 0) == (name == "deepseek_v4")
    assert summary.block_multiple == (16 if name == "deepseek_v4" else 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"kv_lora_rank": 16}, r"kv_a_proj_with_mqa.weight has shape \[40, 64\], expected \[24, 64\]"),
        ({"num_hidden_layers": 4}, r"model.layers.3.input_layernorm.weight is missing"),
    ],
)
def test_an_outline_says_why_a_folder_cannot_be_served(
    oracle: Callable[..., Path], tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(oracle("deepseek_v3"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(outline.summarise(folder).reason)


def test_a_folder_without_a_tokenizer_cannot_be_served(oracle: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(oracle("mixtral"), folder)
    (folder / "tokenizer.json").unlink()
    assert outline.summarise(folder).reason.endswith("tokenizer.json is missing")


def test_folders_of_folders_are_looked_into(
    oracle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mixtral", "deepseek_v3"):
        shutil.copytree(oracle(name), tmp_path / name)
    outline.main([str(tmp_path), str(tmp_path / "nowhere")])
    told = json.loads(capsys.readouterr().out)
    assert [Path(item["folder"]).name for item in told] == ["deepseek_v3", "mixtral", "nowhere"]
    assert [bool(item["reason"]) for item in told] == [False, False, True]


def test_names_of_other_architectures_are_left_alone() -> None:
    assert list(names_of("LlamaForCausalLM")("model.layers.0.mlp.gate_proj.weight")) == [
        "model.layers.0.mlp.gate_proj.weight"
    ]
