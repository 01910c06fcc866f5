"""Builds a model on the device from a checkpoint folder, or from any other source of named tensors."""

from pathlib import Path

from tidemill_engine.cuda.linear import make_linear
from tidemill_engine.cuda.model import CudaModel
from tidemill_engine.cuda.requirements import CudaUnavailable, require_shape
from tidemill_engine.layers.elementwise import TorchElementwise
from tidemill_engine.loading.checkpoint import Checkpoint, TensorSource
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import DENSE_ARCHITECTURES, read_config
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings


def load_cuda_model(
    model_dir: Path, settings: EngineSettings, tp: TensorParallel, tensors: TensorSource | None
) -> CudaModel:
    """Raises CheckpointError for what is missing or unknown, CudaUnavailable for what this backend does not run."""
    config = read_config(model_dir)
    if config.architecture not in DENSE_ARCHITECTURES:
        raise CudaUnavailable(f"architecture {config.architecture} does not run on CUDA yet")
    if tp.size > 1:
        raise CudaUnavailable(f"tp_size = {tp.size}: tensor parallelism on CUDA is not there yet")
    if settings.weights not in ("auto", "bf16"):
        raise CudaUnavailable(f"weights = {settings.weights!r} does not run on CUDA; use 'auto' or 'bf16'")
    if settings.kv_dtype != "bfloat16":
        raise CudaUnavailable(f"kv_dtype = {settings.kv_dtype!r} does not run on CUDA; use 'bfloat16'")
    require_shape(config.head_dim, config.num_heads, config.num_kv_heads)
    source = WeightSource(tensors or Checkpoint(model_dir), tp, make_linear, TorchElementwise())
    return CudaModel(config, source, settings.kv_dtype)
