"""Named tensors of a safetensors folder, one at a time, so that a load never holds a second copy of the model; several
threads may ask."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.names import Names, same_name
from tidemill_engine.loading.quantised import (
    FP4_DTYPES,
    FP8_DTYPE,
    PACKED,
    dequantise,
    factor_names,
    scale_names,
    unpack_fp4,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = ("F32", "BF16", "F16")
INTEGER_DTYPES = ("I64", "I32")


class TensorSource(Protocol):
    """Named tensors of a model."""

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """[start, end) along `axis` of the tensor, whose whole shape is `shape`."""

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """A table of int64 numbers of at least 0 and less than `below`."""


class Checkpoint:
    """Reads tensors by name from one file or from the shards that the index names."""

    def __init__(self, model_dir: Path, names: Names = same_name) -> None:
        self.model_dir = model_dir
        self.names = names
        self._files: dict[Path, Any] = {}
        self._path_of = _paths_by_name(model_dir)

    def __contains__(self, name: str) -> bool:
        return any(stored in self._path_of for stored in self._names_of(name))

    def weight_bytes(self) -> int:
        """Of the files."""
        return sum(path.stat().st_size for path in set(self._path_of.values()))

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """[start, end) along `axis` of the tensor; `shape` is that of the whole tensor. Floating point keeps its stored
        dtype, block-scaled matrices come dequantised.

        Raises CheckpointError naming a tensor that is missing, misshaped or not floating point.
        """
        stored = self._stored_name(name)
        part = self._slice(stored)
        dtype = part.get_dtype()
        end = shape[axis] if end < 0 else end
        if dtype == FP8_DTYPE or (dtype in FP4_DTYPES and len(shape) == 2):
            return self._take_scaled(stored, tuple(shape), axis, start, end)
        self._check_shape(stored, part, shape)
        if dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {stored} has dtype {_torch_name(part)}, expected float32, bfloat16 or float16"
            )
        return self._read(part, axis, start, end)

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """A whole table of int64; raises CheckpointError for a number that is not in [0, below)."""
        stored = self._stored_name(name)
        part = self._slice(stored)
        self._check_shape(stored, part, shape)
        if part.get_dtype() not in INTEGER_DTYPES:
            raise CheckpointError(f"tensor {stored} has dtype {_torch_name(part)}, expected int64 or int32")
        table = self._read(part, 0, 0, shape[0]).long()
        self._check_range(stored, table, below)
        return table

    def _take_scaled(self, stored: str, shape: tuple[int, ...], axis: int, start: int, end: int) -> torch.Tensor:
        part = self._slice(stored)
        packed = 1 if part.get_dtype() == FP8_DTYPE else 2
        if len(shape) != 2:
            raise CheckpointError(f"tensor {stored} is block-scaled, but has {len(shape)} axes")
        rows, columns = shape
        self._check_shape(stored, part, (rows, columns // packed))
        if axis == 1 and (start % packed or end % packed):
            raise CheckpointError(f"tensor {stored}: columns [{start}, {end}) cut a byte of two values")
        scales = next((s for s in scale_names(stored) if s in self._path_of), None)
        if scales is None:
            raise CheckpointError(f"tensor {scale_names(stored)[0]}, the scales of {stored}, is missing")
        self._check_scales(stored, scales)
        divisor = packed if axis == 1 else 1
        values = self._read(part, axis, start // divisor, end // divisor)
        whole = self._unpack(values) if packed == 2 else values
        first = (start, 0) if axis == 0 else (0, start)
        return self._dequantise(stored, whole, self._slice(scales), (rows, columns), first)

    def _check_scales(self, stored: str, scales: str) -> None:
        part = self._slice(scales)
        shape = list(part.get_shape())
        if len(shape) != 2:
            raise CheckpointError(f"tensor {scales} has shape {shape}, expected a scale for each block")
        # NVFP4, whose scales count in a unit that is stored apart.
        if part.get_dtype() == FP8_DTYPE and not any(name in self._path_of for name in factor_names(stored)):
            names = " nor ".join(factor_names(stored))
            raise CheckpointError(f"neither {names} is there, the factor of all scales of {stored}")

    def _unpack(self, values: torch.Tensor) -> torch.Tensor:
        return unpack_fp4(values)

    def _dequantise(
        self, stored: str, values: torch.Tensor, scales: Any, shape: tuple[int, int], first: tuple[int, int]
    ) -> torch.Tensor:
        return dequantise(stored, values, scales[:], shape, first, self._factor(stored))

    def _factor(self, stored: str) -> float:
        multiplies, divides = factor_names(stored)
        if multiplies in self._path_of:
            return float(self._slice(multiplies)[...])
        return 1.0 / float(self._slice(divides)[...]) if divides in self._path_of else 1.0

    def _names_of(self, name: str) -> list[str]:
        return [stored + suffix for stored in self.names(name) for suffix in ("", PACKED)]

    def _check_range(self, stored: str, table: torch.Tensor, below: int) -> None:
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < below:
            raise CheckpointError(f"tensor {stored} has numbers outside [0, {below})")

    def _stored_name(self, name: str) -> str:
        for stored in self._names_of(name):
            if stored in self._path_of:
                return stored
        others = [stored for stored in self.names(name) if stored != name]
        hint = f" (nor is {', '.join(dict.fromkeys(others))} there)" if others else ""
        raise CheckpointError(f"tensor {name} is missing from {self.model_dir}{hint}")

    def _check_shape(self, stored: str, part: Any, shape: Sequence[int]) -> None:
        if list(part.get_shape()) != list(shape):
            raise CheckpointError(f"tensor {stored} has shape {list(part.get_shape())}, expected {list(shape)}")

    def _read(self, part: Any, axis: int, start: int, end: int) -> torch.Tensor:
        tensor: torch.Tensor = part[(slice(None),) * axis + (slice(start, end),)]
        return tensor

    def _slice(self, stored: str) -> Any:
        path = self._path_of[stored]
        if path not in self._files:
            self._files[path] = _open(path)
        return self._files[path].get_slice(stored)


def _torch_name(part: Any) -> str:
    return str(part[:0].dtype)


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
