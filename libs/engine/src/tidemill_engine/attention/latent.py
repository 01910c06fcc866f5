"""Multi-head latent attention over a paged group of (latent, rotated key) rows.

Keys and values of a head are linear in the latent, so there are two ways to the same numbers: expand the latents into
keys and values (cheaper for many queries), or bring the query into latent space and attend there (cheaper for few, and
for rows that an indexer selected). Chunks take the first way, their cached prefix piece by piece; decode the second.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tidemill_engine.attention.base import AttentionBackend, Chunk
from tidemill_engine.attention.parts import attend_part, merge
from tidemill_engine.attention.row_store import RowStore, Selection, tiles
from tidemill_engine.attention.torch_reference import causal_hidden

PIECE_TOKENS = 1024
"""Cached latents that are expanded at a time."""


@dataclass(frozen=True)
class Expansion:
    """How a latent becomes a head's key and value."""

    keys: torch.Tensor
    """[heads, key values, latent values] float32."""
    values: torch.Tensor
    """[heads, values, latent values] float32."""
    scale: float
    """On the scores."""

    @property
    def rank(self) -> int:
        """Values of a latent."""
        return self.keys.shape[2]


class LatentBackend(AttentionBackend, Protocol):
    """Attention over latents, with or without an indexer."""

    def store(self, group: str, layer: int, rows: torch.Tensor) -> None:
        """One row for each token, [tokens, dim]."""

    def select(self, group: str, layer: int, q: torch.Tensor, weights: torch.Tensor, top_k: int) -> Selection:
        """The rows that an indexer wants each token to attend to."""

    def latent(
        self, group: str, layer: int, q: torch.Tensor, expansion: Expansion, selection: Selection | None
    ) -> torch.Tensor:
        """Attends to stored (latent, rotated key) rows; q [tokens, heads, key values + rotated values]; returns
        [tokens, heads * values]."""


class LatentAttention(RowStore):
    """By torch, in float32."""

    def latent(
        self, group: str, layer: int, q: torch.Tensor, expansion: Expansion, selection: Selection | None
    ) -> torch.Tensor:
        batch = self._current()
        chosen = selection or Selection(None, (None,) * len(batch.chunks))
        out = q.new_empty((q.shape[0], q.shape[1], expansion.values.shape[1]))
        if batch.num_decode:
            out[: batch.num_decode] = self._decode(group, layer, q[: batch.num_decode], expansion, chosen.decode)
        for chunk, picked in zip(batch.chunks, chosen.chunks, strict=True):
            if picked is None:
                out[chunk.span] = self._chunk(group, layer, chunk, q[chunk.span], expansion)
            else:
                out[chunk.span] = self._picked_chunk(group, layer, chunk, q[chunk.span], expansion, picked)
        return out.flatten(1)

    def _decode(
        self, group: str, layer: int, q: torch.Tensor, expansion: Expansion, picked: torch.Tensor | None
    ) -> torch.Tensor:
        batch = self._current()
        if picked is None:
            rows = self.decode_rows(group, layer)
            return _attend_absorbed(q, rows, self.decode_hidden(group, rows.shape[1]), expansion)
        rows = self.picked_rows(group, layer, batch.decode_blocks, picked)
        return _attend_absorbed(q, rows, (picked >= batch.decode_lengths[:, None])[:, None], expansion)

    def _picked_chunk(
        self, group: str, layer: int, chunk: Chunk, q: torch.Tensor, expansion: Expansion, picked: torch.Tensor
    ) -> torch.Tensor:
        hidden = (picked >= self.chunk_visible(group, chunk)[:, None])[:, None]
        made = []
        for part in tiles(chunk.num_tokens, picked.shape[1] * (expansion.rank + q.shape[1])):
            rows = self.picked_rows(group, layer, chunk.block_ids[None], picked[part])
            made.append(_attend_absorbed(q[part], rows, hidden[part], expansion))
        return torch.cat(made)

    def _chunk(self, group: str, layer: int, chunk: Chunk, q: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        end = chunk.start + chunk.num_tokens
        by_head = q.transpose(0, 1)
        # A later step reads this chunk from the pool; the chunk itself must see the same values.
        k, v = _expand(self.chunk_rows(group, layer, chunk, chunk.start, end), expansion)
        hidden = causal_hidden(chunk.start, chunk.num_tokens, chunk.start, end)
        parts = [attend_part(by_head, k, v, hidden, expansion.scale)]
        for first in range(0, chunk.start, PIECE_TOKENS):
            rows = self.chunk_rows(group, layer, chunk, first, min(first + PIECE_TOKENS, chunk.start))
            parts.append(attend_part(by_head, *_expand(rows, expansion), None, expansion.scale))
        return merge(parts).transpose(0, 1)


def _expand(rows: torch.Tensor, expansion: Expansion) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, latent + rotated] -> keys [heads, tokens, dim] and values [heads, tokens, values]."""
    latents, rotated = rows[:, : expansion.rank], rows[:, expansion.rank :]
    keys = latents @ expansion.keys.transpose(1, 2)
    shared = rotated.expand(keys.shape[0], -1, -1)
    return torch.cat([keys, shared], dim=-1), latents @ expansion.values.transpose(1, 2)


def _attend_absorbed(q: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """q [queries, heads, dim] over its own rows [queries, count, latent + rotated]; [queries, heads, values]."""
    key_values = expansion.keys.shape[1]
    absorbed = torch.bmm(q[..., :key_values].transpose(0, 1), expansion.keys).transpose(0, 1)
    query = torch.cat([absorbed, q[..., key_values:]], dim=-1)
    mixed = attend_part(query, rows, rows[..., : expansion.rank], hidden, expansion.scale).out
    return torch.bmm(mixed.transpose(0, 1), expansion.values.transpose(1, 2)).transpose(0, 1)
