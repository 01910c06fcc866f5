"""Paged groups of one vector for each row: latents, indexer keys, compressed streams; rows as tokens or fewer."""

from dataclasses import dataclass

import torch

from tidemill_engine.attention.base import Chunk
from tidemill_engine.attention.torch_reference import TorchReference
from tidemill_engine.kv_pool import KVPool

TILE_VALUES = 1 << 21
"""Gathered values and scores of a tile of queries stay below this. Eight megabytes stay in the cache, and in the heap:
larger ones come as fresh pages each time, which takes twice as long."""


@dataclass(frozen=True)
class Selection:
    """Rows that each query attends to, [queries, count] int64 for the decode rows and for each chunk; rows that the
    query cannot see yet are to be hidden. None: all that it can see."""

    decode: torch.Tensor | None
    chunks: tuple[torch.Tensor | None, ...]


class RowStore(TorchReference):
    """Stores rows at their places, gathers them through block tables, and picks the best by an indexer's scores."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self._tokens_per_row = {spec.name: spec.tokens_per_row for spec in self.pool.groups}

    def store(self, group: str, layer: int, rows: torch.Tensor) -> None:
        """One row [tokens, dim] for each token of the batch."""
        batch = self._current()
        self.store_at(group, layer, rows, batch.block_ids, batch.block_offsets)

    def store_at(
        self, group: str, layer: int, rows: torch.Tensor, block_ids: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """rows [n, dim] at row `offsets` of their blocks."""
        slab = self._rows(group, layer)
        slab[block_ids, offsets] = rows.to(slab.dtype)

    def select(self, group: str, layer: int, q: torch.Tensor, weights: torch.Tensor, top_k: int) -> Selection:
        """For each token t the `top_k` rows s with the largest sum over heads of
        weights[t, h] * relu(q[t, h] . row[s]) * dim^-0.5, of equal ones the earlier; q [tokens, heads, dim],
        weights [tokens, heads]."""
        batch = self._current()
        decode = None
        if batch.num_decode:
            visible = batch.decode_lengths // self._tokens_per_row[group]
            if int(visible.max()) > top_k:
                rows = self.decode_rows(group, layer)
                decode = _pick(q[: batch.num_decode], rows, weights[: batch.num_decode], visible, top_k)
        chunks = (
            self._select_chunk(group, layer, chunk, q[chunk.span], weights[chunk.span], top_k) for chunk in batch.chunks
        )
        return Selection(decode, tuple(chunks))

    def decode_rows(self, group: str, layer: int) -> torch.Tensor:
        """[decode rows, rows of their padded tables, dim] float32."""
        table = self._current().decode_blocks
        rows = self._rows(group, layer).index_select(0, table.flatten()).float()
        return rows.view(table.shape[0], -1, rows.shape[-1])

    def decode_hidden(self, group: str, num_rows: int) -> torch.Tensor:
        """[decode rows, 1, rows]: True for a row that is not complete at the token."""
        visible = self._current().decode_lengths // self._tokens_per_row[group]
        return (torch.arange(num_rows) >= visible[:, None])[:, None]

    def chunk_rows(self, group: str, layer: int, chunk: Chunk, first: int, end: int) -> torch.Tensor:
        """[end - first, dim] float32 rows of a chunk's sequence."""
        slab = self._rows(group, layer)
        per_block = slab.shape[1]
        blocks = chunk.block_ids[first // per_block : -(-end // per_block)]
        offset = first // per_block * per_block
        return slab.index_select(0, blocks).flatten(0, 1)[first - offset : end - offset].float()

    def chunk_visible(self, group: str, chunk: Chunk) -> torch.Tensor:
        """[tokens] rows that each token of a chunk can see."""
        ends = torch.arange(chunk.start + 1, chunk.start + chunk.num_tokens + 1)
        return ends // self._tokens_per_row[group]

    def picked_rows(self, group: str, layer: int, tables: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """[queries, count, dim] float32 rows `picked` [queries, count] through `tables` [queries or 1, blocks]."""
        slab = self._rows(group, layer)
        per_block = slab.shape[1]
        blocks = tables.expand(picked.shape[0], -1).gather(1, picked // per_block)
        return slab[blocks, picked % per_block].float()

    def _select_chunk(
        self, group: str, layer: int, chunk: Chunk, q: torch.Tensor, weights: torch.Tensor, top_k: int
    ) -> torch.Tensor | None:
        visible = self.chunk_visible(group, chunk)
        num_rows = int(visible[-1])
        if num_rows <= top_k:
            return None
        rows = self.chunk_rows(group, layer, chunk, 0, num_rows)
        parts = [
            _pick(q[part], rows, weights[part], visible[part], top_k)
            for part in tiles(chunk.num_tokens, q.shape[1] * num_rows)
        ]
        return torch.cat(parts)

    def _rows(self, group: str, layer: int) -> torch.Tensor:
        """[blocks, rows, dim] view of a layer."""
        return self.pool.layer(group, layer)[:, 0, :, 0]


def tiles(count: int, values_each: int) -> list[slice]:
    """`count` queries in runs that touch a bounded number of values."""
    size = max(1, TILE_VALUES // max(1, values_each))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def strongest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[queries, count] places of the largest scores in rising order; of equal ones the earlier, so that neither padding
    nor the batch's shape decides."""
    threshold = scores.topk(count, dim=-1).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=-1) <= room))
    return taken.nonzero()[:, 1].view(-1, count)


def _pick(
    q: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, top_k: int
) -> torch.Tensor:
    scores = torch.relu((q @ rows.transpose(-1, -2)) * q.shape[-1] ** -0.5)
    summed = (weights[:, None] @ scores)[:, 0]
    summed.masked_fill_(torch.arange(summed.shape[1]) >= visible[:, None], float("-inf"))
    return strongest(summed, top_k)
