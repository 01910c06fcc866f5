"""The runner of the device that the settings name."""

from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings


def start_runner(settings: EngineSettings, tp: TensorParallel) -> ModelRunner:
    """Loads the model on `settings.device`; raises ValueError for a device that no backend serves."""
    kind = settings.device.partition(":")[0]
    if kind == "cpu":
        return ModelRunner(settings, tp)
    if kind != "cuda":
        raise ValueError(f"device = {settings.device!r} is neither 'cpu' nor 'cuda'")
    # Triton and FlashInfer are only there on CUDA machines.
    from tidemill_engine.cuda.runner import CudaModelRunner

    return CudaModelRunner(settings, tp)
