"""Checkpoint folders: what loads, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tidemill_engine.loading.checkpoint import INDEX_NAME
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.tiny import SPECIAL_TOKENS, make_tiny
from tidemill_engine.models.config import read_config

TOKENS = list(range(40, 90))


def copied(checkpoint: Path, tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_sharded_checkpoint_equals_the_single_file(
    tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path
) -> None:
    whole = tiny("llama")
    folder = copied(whole, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        shard = f"model-{i % 3}.safetensors"
        weight_map[name] = shard
        path = folder / shard
        save_file((load_file(path) if path.exists() else {}) | {name: tensor}, path)
    (folder / "model.safetensors").unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    expected = start_runner(whole).all_logits(TOKENS)
    assert torch.equal(start_runner(folder).all_logits(TOKENS), expected)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-1\.safetensors"):
        start_runner(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_is_computed_in_float32(
    tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = copied(tiny("qwen2"), tmp_path)
    rewritten(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    plain = start_runner(folder, weights="fp32").all_logits(TOKENS)
    driver = start_runner(folder)
    assert (driver.all_logits(TOKENS) - plain).abs().max() < 1e-4
    assert driver.runner.backend.rsplit("/", 1)[1] == ("bf16" if dtype == torch.bfloat16 else "fp32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight has shape \[63\], expected"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(264, 64, dtype=torch.int32)}),
            r"lm_head\.weight has dtype torch\.int32",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path, change: Any, message: str
) -> None:
    folder = rewritten(copied(tiny("llama"), tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        start_runner(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_key(
    tiny: Callable[..., Path], tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(copied(tiny("llama"), tmp_path, **config))


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_a_truncated_file_is_named(tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        start_runner(folder)


def test_making_a_checkpoint_twice_leaves_the_first(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "a" / "tiny", seed=1)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    make_tiny("llama", folder, seed=2)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny"]


def test_the_tiny_tokenizer_holds_every_id_and_any_text(tiny: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny("llama") / "tokenizer.json"))
    config = json.loads((tiny("llama") / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] <= 320
    assert tokenizer.token_to_id(SPECIAL_TOKENS[2]) == config["eos_token_id"]
    text = "Grüße, 世界 \x00 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
