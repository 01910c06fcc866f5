"""Reads a Hugging Face model folder without torch: its digests and what a ModelCard says of it."""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill_mesh.errors import StartError

HASH_VERSION = b"tidemill-kv-1"
SAMPLES = 16
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20


class ModelFolderError(StartError):
    """The folder is not a model that can be served; the message names what is missing or wrong."""


@dataclass(frozen=True)
class ModelFiles:
    """What the folder says."""

    config: dict[str, Any]
    generation_config_json: str
    tokenizer: Path
    tokenizer_config: bytes
    chat_template: bytes
    """Empty: the model has none."""
    weights_digest: bytes
    """Of the architecture and the weights as they are computed with."""
    created_unix_s: int

    @property
    def hash_root(self) -> bytes:
        """Public prefix of block hashes: version, architecture and weights."""
        return hashlib.sha256(HASH_VERSION + self.weights_digest).digest()[:16]

    @property
    def revision(self) -> str:
        """Short digest of weights and architecture."""
        return self.weights_digest.hex()[:16]

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of a config."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def eos_token_ids(self) -> list[int]:
        """From generation_config.json, which knows all of them, else from config.json."""
        generation = json.loads(self.generation_config_json) if self.generation_config_json else {}
        found = generation.get("eos_token_id", self.text_config.get("eos_token_id"))
        return [found] if isinstance(found, int) else list(found or [])

    @property
    def bos_token_id(self) -> int | None:
        """None for models without one."""
        found = self.text_config.get("bos_token_id")
        return found if isinstance(found, int) else None


def read_model_files(folder: Path, weights: str = "auto") -> ModelFiles:
    """Reads the folder, whose weights are held in memory in the named form; raises ModelFolderError."""
    config_path = folder / "config.json"
    config = json.loads(_required(config_path))
    tokenizer_config = _optional(folder / "tokenizer_config.json")
    _required(folder / "tokenizer.json")
    return ModelFiles(
        config=config,
        generation_config_json=_optional(folder / "generation_config.json").decode(),
        tokenizer=folder / "tokenizer.json",
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        weights_digest=digest_weights(folder, config, rounding_of(config, weights)),
        created_unix_s=int(config_path.stat().st_mtime),
    )


def rounding_of(config: dict[str, Any], weights: str) -> str:
    """The form of the weights in memory where that is not an exact image of what is stored, else "".

    Rounded weights compute other KV: they are another revision, whose blocks no instance of the exact one may take.
    """
    text = config.get("text_config") or config
    stored = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    quantised = (config.get("quantization_config") or {}).get("quant_method", "")
    exact = {"fp8_block": quantised == "fp8", "bf16": stored == "bfloat16", "fp8": False, "int8": False}
    return "" if exact.get(weights, True) else weights


def digest_weights(folder: Path, config: dict[str, Any], rounding: str) -> bytes:
    """sha256 over the architecture, each safetensors header, samples of the content, and how weights are rounded.

    Reading gigabytes at each start would cost more than it tells; a changed weight file almost surely differs in a
    header or in one of the samples.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(f"{folder} has no *.safetensors")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + rounding.encode())
    for file in files:
        for part in _samples(file):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8 or (header_bytes := struct.unpack("<Q", prefix)[0]) > min(size, MAX_HEADER_BYTES):
            raise ModelFolderError(f"{file} is not a safetensors file")
        yield stream.read(header_bytes)
        content = size - 8 - header_bytes
        for index in range(SAMPLES):
            stream.seek(8 + header_bytes + max(0, content - SAMPLE_BYTES) * index // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)


def _chat_template(folder: Path, tokenizer_config: bytes) -> bytes:
    own_file = _optional(folder / "chat_template.jinja")
    if own_file or not tokenizer_config:
        return own_file
    template = json.loads(tokenizer_config).get("chat_template")
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    return template.encode() if isinstance(template, str) else b""


def _required(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFolderError(f"cannot read {path}: {error.strerror}") from error


def _optional(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
