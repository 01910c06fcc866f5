"""Named tensors of a safetensors folder, one at a time, so that a load never holds a second copy of the model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tidemill_engine.loading.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class TensorSource(Protocol):
    """Named tensors of a model."""

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """[start, end) along `axis` of the tensor, whose whole shape is `shape`."""


class Checkpoint:
    """Reads tensors by name from one file or from the shards that the index names."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: dict[Path, Any] = {}
        self._path_of = _paths_by_name(model_dir)

    def __contains__(self, name: str) -> bool:
        return name in self._path_of

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """[start, end) along `axis` of the tensor, in its stored dtype; `shape` is that of the whole tensor.

        Raises CheckpointError naming a tensor that is missing, misshaped or not floating point.
        """
        if name not in self._path_of:
            raise CheckpointError(f"tensor {name} is missing from {self.model_dir}")
        part = self._open(self._path_of[name]).get_slice(name)
        if list(part.get_shape()) != list(shape):
            raise CheckpointError(f"tensor {name} has shape {list(part.get_shape())}, expected {list(shape)}")
        cut = (slice(None),) * axis + (slice(start, shape[axis] if end < 0 else end),)
        tensor: torch.Tensor = part[cut]
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, expected float32, bfloat16 or float16")
        return tensor

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = _open(path)
        return self._files[path]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _paths_by_name(model_dir: Path) -> dict[str, Path]:
    index = model_dir / INDEX_NAME
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: model_dir / file for name, file in weight_map.items()}
    elif (model_dir / SINGLE_NAME).is_file():
        with _open(model_dir / SINGLE_NAME) as file:
            paths = dict.fromkeys(file.keys(), model_dir / SINGLE_NAME)
    else:
        raise CheckpointError(f"{model_dir} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    missing = sorted({path.name for path in paths.values() if not path.is_file()})
    if missing:
        raise CheckpointError(f"{model_dir} lacks {', '.join(missing)}")
    return paths
