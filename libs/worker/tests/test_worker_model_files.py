"""What a model folder says without torch."""

import json
import struct
from pathlib import Path

import pytest

from tidemill_worker.model_card import Assets
from tidemill_worker.model_files import ModelFolderError, read_model_files


def make_folder(folder: Path, *, weights: bytes = b"w" * 100_000, **config: object) -> Path:
    """A folder that looks like a model."""
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, "eos_token_id": 2} | config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_equal_folders_have_equal_revisions_and_roots(tmp_path: Path) -> None:
    one, other = read_model_files(make_folder(tmp_path / "a")), read_model_files(make_folder(tmp_path / "b"))
    assert (one.revision, one.hash_root) == (other.revision, other.hash_root)
    assert len(one.revision) == len(one.hash_root) == 16


@pytest.mark.parametrize(
    "changes", [{"weights": b"w" * 99_999 + b"x"}, {"weights": b"x" + b"w" * 99_999}, {"vocab_size": 11}]
)
def test_other_weights_or_another_architecture_give_another_revision(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    one = read_model_files(make_folder(tmp_path / "a"))
    other = read_model_files(make_folder(tmp_path / "b", **changes))  # type: ignore[arg-type]
    assert one.revision != other.revision
    assert one.hash_root != other.hash_root


@pytest.mark.parametrize(
    ("config", "exact", "rounded"),
    [
        ({}, ["auto", "fp32", "q4_1"], ["bf16", "fp8", "fp8_block", "int8"]),
        ({"dtype": "bfloat16"}, ["auto", "fp32", "bf16"], ["fp8", "fp8_block", "int8"]),
        ({"text_config": {"torch_dtype": "bfloat16"}}, ["auto", "bf16"], ["int8"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["auto", "fp8_block"], ["fp8", "int8"]),
    ],
)
def test_weights_that_are_rounded_in_memory_are_another_revision(
    tmp_path: Path, config: dict[str, object], exact: list[str], rounded: list[str]
) -> None:
    folder = make_folder(tmp_path, **config)
    plain = read_model_files(folder)
    of = {form: read_model_files(folder, form) for form in exact + rounded}
    assert {of[form].hash_root for form in exact} == {plain.hash_root}
    roots = {plain.hash_root, *(of[form].hash_root for form in rounded)}
    revisions = {plain.revision, *(of[form].revision for form in rounded)}
    assert len(roots) == len(revisions) == 1 + len(rounded)


def test_the_generation_config_names_all_eos_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert read_model_files(folder).eos_token_ids == [2]
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read_model_files(folder).eos_token_ids == [2, 5]


def test_a_chat_template_is_found_in_its_own_file_or_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert read_model_files(folder).chat_template == b""
    listed = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]
    for written, expected in (("text", b"text"), (listed, b"listed")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}))
        assert read_model_files(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("own")
    assert read_model_files(folder).chat_template == b"own"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelFolderError, match="not a safetensors file"):
        read_model_files(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
        read_model_files(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
        read_model_files(folder)


async def test_assets_come_back_by_digest_in_parts() -> None:
    assets = Assets()
    content = b"x" * ((1 << 20) + 1)
    parts = [part async for part in assets.read(assets.add(content))]
    assert [len(part) for part in parts] == [1 << 20, 1]
    assert b"".join(parts) == content
    assert assets.add(b"") == ""
