"""Builds a rank's model from a checkpoint folder."""

from pathlib import Path

import torch

from tidemill_engine.layers.linear import FullPrecision, Linear
from tidemill_engine.loading.checkpoint import Checkpoint
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.base import Model
from tidemill_engine.models.config import TOY_ARCHITECTURE, read_config
from tidemill_engine.models.dense import DenseModel
from tidemill_engine.models.toy import ToyModel
from tidemill_engine.parallel.tp import TensorParallel


def load_model(model_dir: Path, kv_dtype: str, tp: TensorParallel) -> Model:
    """Raises CheckpointError for what is missing or unknown, ValueError for a size that tp_size does not divide."""
    config = read_config(model_dir)
    source = WeightSource(Checkpoint(model_dir), tp, make_full_precision)
    if config.architecture == TOY_ARCHITECTURE:
        return ToyModel(config, source, kv_dtype)
    return DenseModel(config, source, kv_dtype)


def make_full_precision(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """float32 in memory."""
    return FullPrecision(weight, bias)
