"""The runner of the device that the settings name."""

from pathlib import Path

from tidemill_engine.cuda.paths import has_kernels
from tidemill_engine.cuda.requirements import require_machine
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.models.config import read_config
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings


def start_runner(settings: EngineSettings, tp: TensorParallel) -> ModelRunner:
    """Loads the model on `settings.device`; raises ValueError for a device that no backend serves, CudaUnavailable for
    what the machine lacks."""
    kind = settings.device.partition(":")[0]
    if kind == "cpu":
        return ModelRunner(settings, tp)
    if kind != "cuda":
        raise ValueError(f"device = {settings.device!r} is neither 'cpu' nor 'cuda'")
    require_machine()
    # Triton and FlashInfer are only there on CUDA machines.
    if not has_kernels(read_config(Path(settings.model_dir))):
        from tidemill_engine.cuda.reference_runner import ReferenceRunner

        return ReferenceRunner(settings, tp)
    from tidemill_engine.cuda.runner import CudaModelRunner

    return CudaModelRunner(settings, tp)
