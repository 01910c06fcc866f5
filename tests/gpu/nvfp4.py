"""A checkpoint's matrices as ModelOpt stores them in NVFP4."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BORDERS = (_SIZES[1:] + _SIZES[:-1]) / 2
_LARGEST_FP4, _LARGEST_FP8 = 6.0, 448.0


def write_nvfp4(source: Path, target: Path) -> Path:
    """Copies a folder; each value of a projection becomes the nearest that its scale allows."""
    shutil.copytree(source, target)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored |= _packed(name, tensor.float())
        else:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _packed(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = matrix.view(matrix.shape[0], -1, 16)
    largest = groups.abs().amax(-1)
    factor = largest.max() / (_LARGEST_FP4 * _LARGEST_FP8)
    scales = (largest / _LARGEST_FP4 / factor).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * factor)[..., None]
    codes = torch.bucketize(scaled.abs(), _BORDERS).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    codes = codes.view(matrix.shape)
    return {name: codes[:, 0::2] | codes[:, 1::2] << 4, f"{name}_scale": scales, f"{name}_scale_2": factor}
