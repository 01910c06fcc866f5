"""What a step gives the model and the attention backends."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Chunk:
    """A run of prompt tokens of one request, after the decode tokens of the batch."""

    first: int
    """Index of its first token in the batch."""
    num_tokens: int
    start: int
    """Position of its first token."""
    block_ids: torch.Tensor
    """[blocks] int64: the request's blocks up to the chunk's end."""
    slot: int
    """Sequence slot, -1 without per-sequence groups."""

    @property
    def span(self) -> slice:
        """Its tokens in the batch."""
        return slice(self.first, self.first + self.num_tokens)


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step: `num_decode` rows with one token each, then chunks. Index tensors are int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    """[tokens] block that takes the token's KV."""
    block_offsets: torch.Tensor
    num_decode: int
    decode_blocks: torch.Tensor
    """[num_decode, blocks] padded with the null block."""
    decode_lengths: torch.Tensor
    """[num_decode] context with the new token."""
    decode_slots: torch.Tensor
    chunks: tuple[Chunk, ...]
    sample_indices: torch.Tensor
    """Tokens whose logits are wanted."""


class AttentionBackend(Protocol):
    """Writes the new tokens' K and V into the pool, then attends. q is [tokens, q heads, dim], k and v
    [tokens, kv heads, dim]; the result is [tokens, q heads * dim]."""

    name: str

    def begin(self, batch: ForwardBatch) -> None:
        """Prepares what all layers of a step share."""

    def paged(self, group: str, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Full causal attention; `layer` is the index inside the group."""

    def window(self, group: str, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention over the last tokens, kept in the sequence slot's ring."""

    def recur(self, group: str, layer: int, decay: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """s[t] = decay[t] * s[t-1] + (1 - decay[t]) * values[t] over each sequence's tokens, from and to its slot;
        all [tokens, heads, values] float32."""
