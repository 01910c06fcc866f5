"""What a model folder holds and whether it can be served, found without reading a weight.

A model is built from tensors that have a shape and no values, so that everything a load would miss is named: an unknown
key of config.json, a shard, a tensor, a shape, a dtype, scales that do not fit.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tidemill_engine.kv_groups import KVGroupSpec, boundary_tokens, canonical_bytes, is_per_sequence, num_model_heads
from tidemill_engine.layers.elementwise import TorchElementwise
from tidemill_engine.loading.checkpoint import Checkpoint
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.quantised import block_places
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.build import build_model
from tidemill_engine.models.config import ModelConfig, read_config
from tidemill_engine.parallel.tp import TensorParallel

KV_DTYPE = "bfloat16"
"""In which KV sizes are told."""


class FolderSummary(msgspec.Struct):
    """One model folder."""

    folder: str
    architecture: str = ""
    weight_bytes: int = 0
    dtypes: str = ""
    """Stored types of the tensors, the most frequent first."""
    context_tokens: int = 0
    kv_bytes_per_token: int = 0
    """Over all ranks, with bfloat16 KV."""
    kv_bytes_per_sequence: int = 0
    """Windows and states beside it."""
    block_multiple: int = 1
    reason: str = ""
    """Why it cannot be served; empty when it can."""


class Outline(Checkpoint):
    """Checks every tensor that is asked for, and gives one without values."""

    def _read(self, part: Any, axis: int, start: int, end: int) -> torch.Tensor:
        shape = list(part.get_shape())
        shape[axis] = end - start
        return torch.empty(shape, dtype=part[:0].dtype, device="meta")

    def _dequantise(
        self, stored: str, values: torch.Tensor, scales: Any, shape: tuple[int, int], first: tuple[int, int]
    ) -> torch.Tensor:
        for axis, blocks in enumerate(scales.get_shape()):
            block_places(stored, 1, first[axis], shape[axis], blocks)
        return torch.empty(values.shape, dtype=torch.bfloat16, device="meta")

    def _unpack(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, dim=1)

    def _check_range(self, stored: str, table: torch.Tensor, below: int) -> None:
        """There are no values to check."""

    def dtypes(self) -> str:
        """Stored types of all tensors."""
        counted = Counter(self._slice(name).get_dtype() for name in self._path_of)
        return ",".join(dtype for dtype, _ in counted.most_common())


class Unread:
    """Stands for a matrix."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an outline computes nothing")


def summarise(folder: Path) -> FolderSummary:
    """Never raises for what is wrong with the folder."""
    summary = FolderSummary(str(folder))
    try:
        config = read_config(folder)
        summary.architecture, summary.context_tokens = config.architecture, config.context_tokens
        outline = Outline(folder, names_of(config.architecture))
        summary.weight_bytes, summary.dtypes = outline.weight_bytes(), outline.dtypes()
        _count_kv(summary, _groups(config, outline))
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(f"{folder / 'tokenizer.json'} is missing")
    except (CheckpointError, ValueError, KeyError, OSError) as error:
        summary.reason = str(error)
    return summary


def model_folders(root: Path) -> list[Path]:
    """The folder itself, or those in it that have a config.json."""
    if (root / "config.json").is_file() or not root.is_dir():
        return [root]
    return sorted(path.parent for path in root.glob("*/config.json")) or [root]


def _groups(config: ModelConfig, outline: Outline) -> tuple[KVGroupSpec, ...]:
    source = WeightSource(outline, TensorParallel(), lambda name, weight, bias: Unread(), TorchElementwise())
    return build_model(config, source, KV_DTYPE).groups


def _count_kv(summary: FolderSummary, groups: tuple[KVGroupSpec, ...]) -> None:
    boundary, heads = boundary_tokens(groups), num_model_heads(groups)
    summary.block_multiple = boundary
    summary.kv_bytes_per_token = canonical_bytes(groups, boundary, 1, 0, heads, KV_DTYPE) // boundary
    kept = tuple(group for group in groups if is_per_sequence(group))
    summary.kv_bytes_per_sequence = canonical_bytes(kept, boundary, 0, 0, heads, KV_DTYPE, with_sequence=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: folders; prints a JSON list."""
    parser = argparse.ArgumentParser(prog="python -m tidemill_engine.loading.outline", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    roots: list[Path] = parser.parse_args(arguments).folders
    summaries = [summarise(folder) for root in roots for folder in model_folders(root)]
    sys.stdout.write(msgspec.json.encode(summaries).decode() + "\n")


if __name__ == "__main__":
    main()
