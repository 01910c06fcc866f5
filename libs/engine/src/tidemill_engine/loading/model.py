"""Builds a rank's model from a checkpoint folder, in the weight format and on the backend that the settings name.

"fp32" is the plain path: torch in float32 throughout. The others run on the C kernels, in float32 arithmetic as well:
"bf16" keeps bfloat16 weights (rounds a float32 checkpoint once), "q4_1" needs a checkpoint whose matrices are exact
images of GGUF blocks. "auto" takes the smallest form that holds each matrix exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from tidemill_engine.attention.base import AttentionBackend
from tidemill_engine.attention.compressed import CompressedAttention
from tidemill_engine.attention.latent import LatentAttention
from tidemill_engine.attention.native import NativeAttention, unsupported
from tidemill_engine.attention.torch_reference import TorchReference
from tidemill_engine.kernels.build import KernelsUnavailable
from tidemill_engine.kernels.native import has_tile_unit, load
from tidemill_engine.kernels.packing import Packed, pack_float, pack_q4_1, pack_q8_0
from tidemill_engine.kv_pool import KVPool
from tidemill_engine.layers.elementwise import NativeElementwise, TorchElementwise
from tidemill_engine.layers.linear import FullPrecision, Linear, PackedLinear
from tidemill_engine.loading.checkpoint import Checkpoint, TensorSource
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.read_ahead import reading_ahead
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.base import Model
from tidemill_engine.models.build import build_model
from tidemill_engine.models.config import ModelConfig, read_config
from tidemill_engine.parallel.tp import TensorParallel

log = structlog.get_logger()

CUDA_ONLY = ("fp8", "fp8_block", "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class LoadedModel:
    """A model and how it computes."""

    model: Model[Any]
    make_attention: Callable[[KVPool], AttentionBackend]
    backend: str


def load_model(
    model_dir: Path, weights: str, kv_dtype: str, tp: TensorParallel, *, index_dtype: str = "auto"
) -> LoadedModel:
    """Raises CheckpointError for what is missing or unknown, ValueError for a size that tp_size does not divide."""
    config = read_config(model_dir)
    for name, value in (("weights", weights), ("kv_dtype", kv_dtype), ("index_dtype", index_dtype)):
        if value in CUDA_ONLY:
            raise CheckpointError(f"{name} = {value!r} runs on CUDA only")
    checkpoint = Checkpoint(model_dir, names_of(config.architecture))
    reason = "" if weights == "fp32" else _native_obstacle(config)
    if reason and weights != "auto":
        raise CheckpointError(f"weights = {weights!r} cannot be used: {reason}")
    if reason:
        log.warning("cpu_kernels_unavailable", reason=reason, backend="torch-reference", weights="fp32")
    with reading_ahead(checkpoint, config, tp) as tensors:
        return _load(config, tensors, "fp32" if reason else weights, kv_dtype, tp)


def _load(config: ModelConfig, tensors: TensorSource, weights: str, kv_dtype: str, tp: TensorParallel) -> LoadedModel:
    if weights == "fp32":
        plain = build_model(config, WeightSource(tensors, tp, make_full_precision, TorchElementwise()), kv_dtype)
        return LoadedModel(plain, attention_of(config, TorchReference), "cpu/torch-reference/fp32")
    packer = Packer(weights)
    model = build_model(config, WeightSource(tensors, tp, packer.make, NativeElementwise()), kv_dtype)
    unit = "native-amx" if has_tile_unit() else "native"
    attention = attention_of(config, NativeAttention)
    by = "" if attention is NativeAttention else "/torch-attention"
    return LoadedModel(model, attention, f"cpu/{unit}{by}/{packer.main_format}")


def make_full_precision(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """float32 in memory."""
    return FullPrecision(weight, bias)


class Packer:
    """Chooses a packed form for each matrix."""

    def __init__(self, weights: str) -> None:
        self.weights = weights
        self.main_format = ""
        """Form of the first matrix, which is that of most."""

    def make(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = self._pack(name, weight, bias)
        self.main_format = self.main_format if self.main_format not in ("", "q8_0") else packed.format
        return PackedLinear(packed)

    def _pack(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        if self.weights == "bf16":
            return pack_float(weight, bias, "bf16")
        if weight.dtype == torch.bfloat16 and self.weights == "auto":
            return pack_float(weight, bias, "bf16")
        exact = pack_q4_1(weight, bias) or pack_q8_0(weight, bias)
        if exact is None and self.weights == "q4_1":
            raise CheckpointError(f"weights = 'q4_1': tensor {name} is not an exact image of Q4_1 or Q8_0 blocks")
        return exact or pack_float(weight, bias, "fp32")


def attention_of(
    config: ModelConfig, grouped_query: Callable[[KVPool], AttentionBackend]
) -> Callable[[KVPool], AttentionBackend]:
    """The backend of the model's kind of attention."""
    if config.streams is not None:
        return CompressedAttention
    return LatentAttention if config.latent is not None else grouped_query


def _native_obstacle(config: ModelConfig) -> str:
    """Why the C kernels cannot run this model here; empty when they can."""
    try:
        load()
    except KernelsUnavailable as error:
        return str(error)
    for name, width in config.input_widths().items():
        if width % 32:
            return f"{name} {width} is not a multiple of 32"
    if config.latent is not None or config.streams is not None:
        return ""
    return unsupported(config.head_dim, config.num_heads // config.num_kv_heads)
