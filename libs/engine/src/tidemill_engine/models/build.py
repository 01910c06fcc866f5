"""The model of a configuration."""

from typing import Any

from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.base import Model
from tidemill_engine.models.config import TOY_ARCHITECTURE, ModelConfig
from tidemill_engine.models.dense import DenseModel
from tidemill_engine.models.latent import LatentModel
from tidemill_engine.models.streams import StreamModel
from tidemill_engine.models.toy import ToyModel


def build_model(config: ModelConfig, source: WeightSource, kv_dtype: str) -> Model[Any]:
    """Takes every tensor that it needs from the source."""
    if config.latent is not None:
        return LatentModel(config, source, kv_dtype)
    if config.streams is not None:
        return StreamModel(config, source, kv_dtype)
    if config.architecture == TOY_ARCHITECTURE:
        return ToyModel(config, source, kv_dtype)
    return DenseModel(config, source, kv_dtype)
