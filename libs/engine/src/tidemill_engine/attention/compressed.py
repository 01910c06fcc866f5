"""Attention over a window of single vectors and a compressed stream of the tokens before it.

A compressor turns each run of `ratio` tokens into one row of a paged stream: a gated mean of the run's vectors, with
overlap of those of the run before as well. What it still needs of the last tokens lies in a ring of sequence state:

    ring (overlap)     | run w-1: first half of the channels | run w: second half |   2 * ratio tokens
    ring (no overlap)  |                                     | run w              |       ratio tokens
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tidemill_engine.attention.base import AttentionBackend, Chunk
from tidemill_engine.attention.parts import Part, attend_part, merge
from tidemill_engine.attention.row_store import RowStore, Selection, tiles
from tidemill_engine.attention.torch_reference import causal_hidden


@dataclass(frozen=True)
class Compressor:
    """How a run of tokens becomes a row."""

    state: str
    """State group of the ring."""
    ratio: int
    overlap: bool
    bias: torch.Tensor
    """[ratio, channels] float32, added to the gates by place in the run."""

    @property
    def ring_tokens(self) -> int:
        """Tokens that the ring holds."""
        return self.ratio * (2 if self.overlap else 1)


class Runs(NamedTuple):
    """Runs that the batch completes."""

    means: torch.Tensor
    """[runs, dim] float32."""
    last: torch.Tensor
    """[runs] int64: their last tokens in the batch."""


@dataclass(frozen=True)
class Stream:
    """Compressed rows that a layer attends to."""

    group: str
    layer: int
    selection: Selection | None


class CompressedBackend(AttentionBackend, Protocol):
    """Windows, streams and their indexer."""

    def compress(self, compressor: Compressor, layer: int, values: torch.Tensor, gates: torch.Tensor) -> Runs:
        """Takes the batch's tokens, [tokens, channels] float32 each, into the rings."""

    def store_runs(self, group: str, layer: int, rows: torch.Tensor, last: torch.Tensor) -> None:
        """Rows [runs, dim] of the runs that end at tokens `last` of the batch."""

    def select(self, group: str, layer: int, q: torch.Tensor, weights: torch.Tensor, top_k: int) -> Selection:
        """The rows that an indexer wants each token to attend to."""

    def windowed(
        self, group: str, layer: int, q: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor, stream: Stream | None
    ) -> torch.Tensor:
        """Attends to the last tokens' rows [tokens, dim], which are keys and values at once, to the stream's, and to a
        sink for each head; q and the result are [tokens, heads, dim]."""


class CompressedAttention(RowStore):
    """By torch, in float32."""

    def compress(self, compressor: Compressor, layer: int, values: torch.Tensor, gates: torch.Tensor) -> Runs:
        batch = self._current()
        slab = self.pool.layer(compressor.state, layer)
        # [slots, tokens, values and gates, channels]
        rings = slab.view(slab.shape[0], compressor.ring_tokens, 2, -1)
        tokens = torch.stack([values, gates], dim=1)
        made = [self._compress_decode(compressor, rings, tokens[: batch.num_decode])] if batch.num_decode else []
        made += [_compress_chunk(compressor, rings[chunk.slot], chunk, tokens[chunk.span]) for chunk in batch.chunks]
        return Runs(torch.cat([runs.means for runs in made]), torch.cat([runs.last for runs in made]))

    def store_runs(self, group: str, layer: int, rows: torch.Tensor, last: torch.Tensor) -> None:
        batch = self._current()
        self.store_at(
            group, layer, rows, batch.block_ids[last], batch.block_offsets[last] // self._tokens_per_row[group]
        )

    def windowed(
        self, group: str, layer: int, q: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor, stream: Stream | None
    ) -> torch.Tensor:
        batch = self._current()
        rings = self.pool.layer(group, layer)[:, 0, :, 0]
        out = torch.empty_like(q)
        if batch.num_decode:
            decode = slice(0, batch.num_decode)
            parts = [self._decode_ring(rings, q[decode], rows[decode])]
            parts += self._decode_stream(q[decode], stream)
            out[decode] = merge(parts, sinks)
        for index, chunk in enumerate(batch.chunks):
            local = _chunk_window(rings[chunk.slot], chunk, q[chunk.span], rows[chunk.span])
            picked = stream.selection.chunks[index] if stream is not None and stream.selection is not None else None
            parts = [local, *self._chunk_stream(chunk, q[chunk.span], stream, picked)]
            out[chunk.span] = merge(parts, sinks)
        return out

    def _compress_decode(self, compressor: Compressor, rings: torch.Tensor, tokens: torch.Tensor) -> Runs:
        batch = self._current()
        size, ratio = compressor.ring_tokens, compressor.ratio
        positions = batch.positions[: batch.num_decode]
        rings[batch.decode_slots, positions % size] = tokens
        last = ((positions + 1) % ratio == 0).nonzero()[:, 0]
        ends = positions[last]
        places = (ends[:, None] + torch.arange(1, size + 1)) % size
        runs = rings[batch.decode_slots[last, None], places]
        return Runs(_means(compressor, runs, ends < ratio), last)

    def _decode_ring(self, rings: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> Part:
        batch = self._current()
        size = rings.shape[1]
        positions = batch.positions[: batch.num_decode]
        rings[batch.decode_slots, positions % size] = rows.to(rings.dtype)
        kept = rings[batch.decode_slots].float()
        # Before the ring is full, its places past the position were never written.
        hidden = (torch.arange(size) > positions[:, None])[:, None]
        return attend_part(q, kept, kept, hidden, _scale(q))

    def _decode_stream(self, q: torch.Tensor, stream: Stream | None) -> list[Part]:
        batch = self._current()
        if stream is None or not batch.decode_blocks.numel():
            return []
        picked = stream.selection.decode if stream.selection else None
        if picked is None:
            rows = self.decode_rows(stream.group, stream.layer)
            hidden = self.decode_hidden(stream.group, rows.shape[1])
        else:
            rows = self.picked_rows(stream.group, stream.layer, batch.decode_blocks, picked)
            visible = batch.decode_lengths // self._tokens_per_row[stream.group]
            hidden = (picked >= visible[:, None])[:, None]
        return [attend_part(q, rows, rows, hidden, _scale(q))]

    def _chunk_stream(
        self, chunk: Chunk, q: torch.Tensor, stream: Stream | None, picked: torch.Tensor | None
    ) -> list[Part]:
        if stream is None:
            return []
        visible = self.chunk_visible(stream.group, chunk)
        num_rows = int(visible[-1])
        if not num_rows:
            return []
        rows = self.chunk_rows(stream.group, stream.layer, chunk, 0, num_rows) if picked is None else None
        width = num_rows if picked is None else picked.shape[1]
        parts = []
        for tile in tiles(chunk.num_tokens, width * (q.shape[1] + (0 if picked is None else q.shape[2]))):
            places = torch.arange(num_rows) if picked is None else picked[tile]
            hidden = (places >= visible[tile, None])[:, None]
            seen = rows
            if picked is not None:
                seen = self.picked_rows(stream.group, stream.layer, chunk.block_ids[None], picked[tile])
            assert seen is not None, "all rows or picked ones"
            parts.append(attend_part(q[tile], seen, seen, hidden, _scale(q)))
        return [_joined(parts)]


def _compress_chunk(compressor: Compressor, ring: torch.Tensor, chunk: Chunk, tokens: torch.Tensor) -> Runs:
    size, ratio = compressor.ring_tokens, compressor.ratio
    start, end = chunk.start, chunk.start + chunk.num_tokens
    first_run, num_runs = start // ratio, end // ratio - start // ratio
    first = first_run * ratio - (size - ratio)
    # Before the first token there is nothing; its gates are hidden below.
    missing = torch.zeros(max(0, -first), *tokens.shape[1:])
    known = torch.cat([missing, ring[torch.arange(max(0, first), start) % size], tokens])
    runs = known.new_empty(0, *known.shape[1:], size)
    if num_runs:
        runs = known[: size + (num_runs - 1) * ratio].unfold(0, size, ratio)
    ends = (first_run + 1 + torch.arange(num_runs)) * ratio - 1
    means = _means(compressor, runs.permute(0, 3, 1, 2), ends < ratio)
    kept = torch.arange(max(start, end - size), end)
    ring[kept % size] = tokens[kept - start]
    return Runs(means, chunk.first + ends - start)


def _means(compressor: Compressor, runs: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
    """runs [runs, ring tokens, values and gates, channels] in order of position -> [runs, dim]."""
    values, gates = runs[:, :, 0], runs[:, :, 1]
    if not compressor.overlap:
        return (values * torch.softmax(gates + compressor.bias, dim=1)).sum(dim=1)
    ratio, dim = compressor.ratio, runs.shape[-1] // 2
    values = torch.cat([values[:, :ratio, :dim], values[:, ratio:, dim:]], dim=1)
    before = gates[:, :ratio, :dim] + compressor.bias[:, :dim]
    before = before.masked_fill(is_first[:, None, None], float("-inf"))
    gates = torch.cat([before, gates[:, ratio:, dim:] + compressor.bias[:, dim:]], dim=1)
    return (values * torch.softmax(gates, dim=1)).sum(dim=1)


def _chunk_window(ring: torch.Tensor, chunk: Chunk, q: torch.Tensor, rows: torch.Tensor) -> Part:
    size = ring.shape[0]
    start, end = chunk.start, chunk.start + chunk.num_tokens
    first = max(0, start - size + 1)
    # The pool's dtype decides what later steps see of this chunk; the chunk itself must see the same.
    seen = torch.cat([ring[torch.arange(first, start) % size].float(), rows.to(ring.dtype).float()])
    parts = []
    for tile in tiles(chunk.num_tokens, q.shape[1] * min(len(seen), 2 * size)):
        low = max(0, start + tile.start - size + 1 - first)
        high = start + tile.stop - first
        hidden = causal_hidden(start + tile.start, tile.stop - tile.start, first + low, first + high, window=size)
        parts.append(attend_part(q[tile], seen[low:high], seen[low:high], hidden[:, None], _scale(q)))
    kept = torch.arange(max(start, end - size), end)
    ring[kept % size] = rows[kept - start].to(ring.dtype)
    return _joined(parts)


def _joined(parts: list[Part]) -> Part:
    """Of consecutive queries."""
    return Part(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _scale(q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
