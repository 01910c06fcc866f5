"""What the runner asks of a model."""

from typing import Protocol, TypeVar

import torch

from tidemill_engine.attention.base import AttentionBackend, ForwardBatch
from tidemill_engine.kv_groups import KVGroupSpec

Backend = TypeVar("Backend", bound=AttentionBackend, contravariant=True)


class ModelShape(Protocol):
    """What the pool and the tables are sized by."""

    groups: tuple[KVGroupSpec, ...]
    vocab_size: int
    context_tokens: int


class Model(ModelShape, Protocol[Backend]):
    """One rank's part of a decoder, and the attention that it needs."""

    def forward(self, batch: ForwardBatch, attention: Backend) -> torch.Tensor:
        """[tokens of batch.sample_indices, hidden] after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] float32, the same on every rank."""
