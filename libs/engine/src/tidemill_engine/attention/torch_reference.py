"""Plain torch attention: the oracle, and what runs where no kernel fits. Decode has no loop over requests."""

import torch

from tidemill_engine.attention.base import Chunk, ForwardBatch
from tidemill_engine.kv_pool import KVPool


class TorchReference:
    """Gathers blocks through padded block tables; computes in float32 whatever the pool's dtype."""

    name = "torch-reference"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._batch: ForwardBatch | None = None
        self._decode_hidden = torch.empty(0)

    def begin(self, batch: ForwardBatch) -> None:
        self._batch = batch
        num_tokens = batch.decode_blocks.shape[1] * self.pool.block_size
        # [decode rows, 1, 1, context]: True where there is no token.
        self._decode_hidden = (torch.arange(num_tokens) >= batch.decode_lengths[:, None])[:, None, None]

    def paged(self, group: str, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._current()
        slab = self.pool.layer(group, layer)
        keys, values = slab[:, 0], slab[:, 1]
        keys[batch.block_ids, batch.block_offsets] = k.to(slab.dtype)
        values[batch.block_ids, batch.block_offsets] = v.to(slab.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        if batch.num_decode:
            table = batch.decode_blocks
            rows = (table.shape[0], -1, *k.shape[1:])
            gathered_k = keys.index_select(0, table.flatten()).view(rows)
            gathered_v = values.index_select(0, table.flatten()).view(rows)
            decoding = q[: batch.num_decode, None]
            out[: batch.num_decode] = attend(decoding, gathered_k, gathered_v, self._decode_hidden)[:, 0]
        for chunk in batch.chunks:
            length = chunk.start + chunk.num_tokens
            chunk_k = keys.index_select(0, chunk.block_ids).flatten(0, 1)[:length]
            chunk_v = values.index_select(0, chunk.block_ids).flatten(0, 1)[:length]
            hidden = causal_hidden(chunk.start, chunk.num_tokens, 0, length)
            out[chunk.span] = attend(q[None, chunk.span], chunk_k[None], chunk_v[None], hidden)[0]
        return out.flatten(1)

    def window(self, group: str, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._current()
        ring = self.pool.layer(group, layer)
        out = torch.empty(q.shape, dtype=q.dtype)
        if batch.num_decode:
            decode = slice(0, batch.num_decode)
            out[decode] = self._decode_window(ring, q[decode], k[decode], v[decode])
        for chunk in batch.chunks:
            out[chunk.span] = _chunk_window(ring[chunk.slot], chunk, q[chunk.span], k[chunk.span], v[chunk.span])
        return out.flatten(1)

    def recur(self, group: str, layer: int, decay: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        batch = self._current()
        slab = self.pool.layer(group, layer)
        fresh = (1 - decay) * values
        out = torch.empty_like(values)
        if batch.num_decode:
            decode = slice(0, batch.num_decode)
            out[decode] = decay[decode] * slab[batch.decode_slots] + fresh[decode]
            slab[batch.decode_slots] = out[decode]
        for chunk in batch.chunks:
            state = slab[chunk.slot]
            for token in range(chunk.first, chunk.first + chunk.num_tokens):
                state = out[token] = decay[token] * state + fresh[token]
            slab[chunk.slot] = state
        return out

    def _decode_window(self, ring: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._current()
        size = ring.shape[2]
        positions = batch.positions[: batch.num_decode]
        ring[batch.decode_slots, 0, positions % size] = k.to(ring.dtype)
        ring[batch.decode_slots, 1, positions % size] = v.to(ring.dtype)
        kept = ring[batch.decode_slots]
        # Before the ring is full, its places past the position were never written.
        hidden = (torch.arange(size) > positions[:, None])[:, None, None]
        return attend(q[:, None], kept[:, 0], kept[:, 1], hidden)[:, 0]

    def _current(self) -> ForwardBatch:
        assert self._batch is not None, "begin() comes first"
        return self._batch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention: q [rows, queries, q heads, dim], k and v [rows, context, kv heads, dim], `hidden`
    broadcastable to [rows, heads, queries, context]. Masked values must be finite."""
    num_rows, num_queries, num_heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(num_rows, num_queries, kv_heads, num_heads // kv_heads, dim)
    # Queries of one group share a KV head: [rows, kv heads, group * queries, dim].
    stacked = grouped.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, -1, dim)
    scores = stacked @ k.to(q.dtype).permute(0, 2, 3, 1)
    scores *= dim**-0.5
    shaped = scores.view(num_rows, kv_heads * (num_heads // kv_heads), num_queries, -1)
    shaped.masked_fill_(hidden, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ v.to(q.dtype).transpose(1, 2)
    return out.view(num_rows, num_heads, num_queries, dim).transpose(1, 2)


def causal_hidden(start: int, num_queries: int, first_key: int, end_key: int, window: int = 0) -> torch.Tensor:
    """[queries, keys]: True where position first_key + j may not be seen from position start + i."""
    queries = torch.arange(start, start + num_queries)[:, None]
    keys = torch.arange(first_key, end_key)
    hidden = keys > queries
    return hidden | (keys <= queries - window) if window else hidden


def _chunk_window(ring: torch.Tensor, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    size = ring.shape[1]
    first = max(0, chunk.start - size)
    end = chunk.start + chunk.num_tokens
    before = ring[:, torch.arange(first, chunk.start) % size].to(k.dtype)
    # The pool's dtype decides what later steps see of this chunk; the chunk itself must see the same.
    seen_k = torch.cat([before[0], k.to(ring.dtype).to(k.dtype)])
    seen_v = torch.cat([before[1], v.to(ring.dtype).to(v.dtype)])
    hidden = causal_hidden(chunk.start, chunk.num_tokens, first, end, window=size)
    out = attend(q[None], seen_k[None], seen_v[None], hidden)[0]
    kept = torch.arange(max(chunk.start, end - size), end)
    ring[0, kept % size] = k[kept - chunk.start].to(ring.dtype)
    ring[1, kept % size] = v[kept - chunk.start].to(ring.dtype)
    return out
