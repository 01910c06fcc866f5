"""Builds a model on the device from a checkpoint folder, or from any other source of named tensors."""

from pathlib import Path

import torch

from tidemill_engine.cuda.experts import EXPERT_FORMATS
from tidemill_engine.cuda.latent_model import CudaLatentModel
from tidemill_engine.cuda.linear import LinearMaker
from tidemill_engine.cuda.model import CudaModel
from tidemill_engine.cuda.paths import has_kernels
from tidemill_engine.cuda.requirements import (
    CudaUnavailable,
    require_hopper,
    require_latent_shape,
    require_shape,
    require_stream_shape,
)
from tidemill_engine.cuda.stream_model import CudaStreamModel
from tidemill_engine.cuda.weight_formats import FORMATS
from tidemill_engine.layers.elementwise import TorchElementwise
from tidemill_engine.loading.checkpoint import Checkpoint, TensorSource
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.read_ahead import reading_ahead
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig, read_config
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings

KV_DTYPES = ("bfloat16", "float8_e4m3fn")
ROW_KV_DTYPES = ("bfloat16",)
"""Of latents and streams."""

CudaDecoder = CudaModel | CudaLatentModel | CudaStreamModel


def load_cuda_model(
    model_dir: Path, settings: EngineSettings, tp: TensorParallel, tensors: TensorSource | None
) -> CudaDecoder:
    """Raises CheckpointError for what is missing or unknown, CudaUnavailable for what this backend does not run."""
    config = read_config(model_dir)
    _check(config, settings, tp)
    if tensors is not None:
        return _build(config, tensors, settings, tp)
    with reading_ahead(Checkpoint(model_dir, names_of(config.architecture)), config, tp) as ahead:
        return _build(config, ahead, settings, tp)


def _build(config: ModelConfig, tensors: TensorSource, settings: EngineSettings, tp: TensorParallel) -> CudaDecoder:
    make_weight = FORMATS[settings.weights]
    make_linear = LinearMaker(make_weight, batch_invariant=settings.batch_invariant)
    source = WeightSource(tensors, tp, make_linear, TorchElementwise())
    if config.latent is not None:
        fp8_scores = settings.index_dtype == "float8_e4m3fn"
        return CudaLatentModel(config, source, settings.kv_dtype, make_weight, fp8_scores=fp8_scores)
    if config.streams is not None:
        return CudaStreamModel(config, source, settings.kv_dtype, make_weight)
    return CudaModel(config, source, settings.kv_dtype, make_weight, batch_invariant=settings.batch_invariant)


def _check(config: ModelConfig, settings: EngineSettings, tp: TensorParallel) -> None:
    if not has_kernels(config):
        raise CudaUnavailable(f"architecture {config.architecture} has no kernels on CUDA")
    if tp.size > 1:
        raise CudaUnavailable(f"tp_size = {tp.size}: tensor parallelism on CUDA is not there yet")
    formats = tuple(FORMATS) if config.moe is None else EXPERT_FORMATS
    if settings.weights not in formats:
        raise CudaUnavailable(f"weights = {settings.weights!r} does not run on CUDA; there are {', '.join(formats)}")
    kv_dtypes = ROW_KV_DTYPES if config.latent is not None or config.streams is not None else KV_DTYPES
    if settings.kv_dtype not in kv_dtypes:
        raise CudaUnavailable(
            f"kv_dtype = {settings.kv_dtype!r} does not run on CUDA; there are {', '.join(kv_dtypes)}"
        )
    if settings.index_dtype != "auto" and config.indexer is None:
        raise CudaUnavailable(f"index_dtype = {settings.index_dtype!r}: {config.architecture} has no such indexer")
    if settings.batch_invariant and (config.moe is not None or config.latent is not None):
        raise CudaUnavailable("batch_invariant is there for models without experts and latents only")
    if config.moe is not None and settings.weights == "fp8_block":
        require_hopper(torch.cuda.get_device_capability(), "experts in FP8")
    if config.latent is not None:
        require_hopper(torch.cuda.get_device_capability(), "latents")
        require_latent_shape(config.latent, config.indexer)
    elif config.streams is not None:
        require_hopper(torch.cuda.get_device_capability(), "compressed streams")
        require_stream_shape(config.head_dim, config.streams)
    else:
        require_shape(config.head_dim, config.num_heads, config.num_kv_heads)
