"""The CPU's plain torch model on a CUDA device: what runs where this backend has no kernels yet.

It computes in float32, launch by launch, and waits for the device several times a step; which models take it is said by
`cuda.paths`, in the log and in the backend's name.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from tidemill_engine.attention.base import Chunk, ForwardBatch
from tidemill_engine.attention.torch_reference import TorchReference
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.paths import require_reference
from tidemill_engine.layers.elementwise import TorchElementwise
from tidemill_engine.loading.checkpoint import Checkpoint, TensorSource
from tidemill_engine.loading.model import attention_of, make_full_precision
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.read_ahead import reading_ahead
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.model_runner import ModelRunner, RowTables
from tidemill_engine.models.base import Model, ModelShape
from tidemill_engine.models.build import build_model
from tidemill_engine.models.config import ModelConfig, read_config
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import ScheduledRow, SchedulerOutput, StepResult

log = structlog.get_logger()


class ReferenceRunner(ModelRunner):
    """Same steps and tables as the CPU runner; `tensors` replaces the checkpoint of the model folder."""

    pool_type = CudaKVPool

    def __init__(self, settings: EngineSettings, tp: TensorParallel, tensors: TensorSource | None = None) -> None:
        self.device = torch.device(settings.device)
        torch.cuda.set_device(self.device.index or 0)
        self._tensors = tensors
        super().__init__(settings, tp)
        self.rows = DeviceRowTables(settings.max_num_seqs, self.context_tokens, settings.block_size, self.device)

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs one step; tensors that the model makes on its way lie on the device."""
        with self.device:
            return super().execute(out)

    def _load(self, settings: EngineSettings) -> ModelShape:
        folder = Path(settings.model_dir)
        config = read_config(folder)
        require_reference(config, settings, self.tp)
        if self._tensors is not None:
            model = self._build(config, self._tensors, settings)
        else:
            with reading_ahead(Checkpoint(folder, names_of(config.architecture)), config, self.tp) as tensors:
                model = self._build(config, tensors, settings)
        self.model = model
        self.backend = "cuda/torch-reference/fp32"
        self._make_attention = attention_of(config, TorchReference)
        log.warning("cuda_reference_path", architecture=config.architecture, backend=self.backend)
        return model

    def _build(self, config: ModelConfig, tensors: TensorSource, settings: EngineSettings) -> Model[Any]:
        on_device = DeviceTensors(tensors, self.device)
        source = WeightSource(on_device, self.tp, make_full_precision, TorchElementwise())
        with self.device:
            return build_model(config, source, settings.kv_dtype)


class DeviceTensors:
    """Tensors of a checkpoint on a device."""

    def __init__(self, tensors: TensorSource, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """As the checkpoint gives it."""
        with torch.device("cpu"):
            taken = self._tensors.take(name, shape, axis=axis, start=start, end=end)
        return taken.to(self._device)

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """int64."""
        with torch.device("cpu"):
            taken = self._tensors.take_integers(name, shape, below)
        return taken.to(self._device)


class DeviceRowTables(RowTables):
    """Tables on the host, batches on the device."""

    def __init__(self, num_rows: int, context_tokens: int, block_size: int, device: torch.device) -> None:
        super().__init__(num_rows, context_tokens, block_size)
        self._device = device

    def batch(self, scheduled: list[ScheduledRow], null_block: int) -> tuple[ForwardBatch, np.ndarray]:
        """The step's tokens on the device, and the blocks that it writes from their beginning."""
        batch, fresh = super().batch(scheduled, null_block)
        parts: dict[str, Any] = {"chunks": tuple(self._placed(chunk) for chunk in batch.chunks)}
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                parts[name] = value.to(self._device)
        return dataclasses.replace(batch, **parts), fresh

    def _placed(self, chunk: Chunk) -> Chunk:
        return dataclasses.replace(chunk, block_ids=chunk.block_ids.to(self._device))
