"""Which runner serves which model on CUDA."""

from tidemill_engine.cuda.requirements import CudaUnavailable
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings

REFERENCE_WEIGHTS = ("auto", "fp32")
REFERENCE_KV_DTYPES = ("float32", "bfloat16")


def has_kernels(config: ModelConfig) -> bool:
    """This backend's own kernels run the model; others take the plain torch path on the device."""
    return not config.window_tokens


def require_reference(config: ModelConfig, settings: EngineSettings, tp: TensorParallel) -> None:
    """Raises CudaUnavailable for what the reference path does not run."""
    by = f"architecture {config.architecture} runs by plain torch on CUDA, which has no"
    if tp.size > 1:
        raise CudaUnavailable(f"{by} tensor parallelism (tp_size = {tp.size})")
    if settings.weights not in REFERENCE_WEIGHTS:
        raise CudaUnavailable(f"{by} weights = {settings.weights!r}; there are {', '.join(REFERENCE_WEIGHTS)}")
    if settings.kv_dtype not in REFERENCE_KV_DTYPES:
        raise CudaUnavailable(f"{by} kv_dtype = {settings.kv_dtype!r}; there are {', '.join(REFERENCE_KV_DTYPES)}")
    if settings.index_dtype != "auto":
        raise CudaUnavailable(f"{by} index_dtype = {settings.index_dtype!r}")
    if settings.batch_invariant:
        raise CudaUnavailable(f"{by} batch-invariant mode")
