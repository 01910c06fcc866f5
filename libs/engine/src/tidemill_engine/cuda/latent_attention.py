"""Attention over latents: single tokens in latent space, chunks over expanded keys and values or chosen rows.

| rows | without an indexer | with one |
|---|---|---|
| single tokens | `latent_decode` over blocks | `latent_decode` over chosen rows |
| chunks | `latent_chunk`, the cached prefix in pieces | the same up to top_k rows, then as single tokens |
"""

from dataclasses import dataclass

import numpy as np
import torch

from tidemill_engine.cuda.attention import PageTable
from tidemill_engine.cuda.item_plan import ITEM_WORDS, WHOLE_ROW, most_items, most_programs, plan_items
from tidemill_engine.cuda.kernels.index_scores import score_rows
from tidemill_engine.cuda.kernels.latent_chunk import attend_piece
from tidemill_engine.cuda.kernels.latent_decode import attend_latent, latent_tiles
from tidemill_engine.cuda.kernels.row_choice import choose_rows
from tidemill_engine.cuda.kv_pool import CudaKVPool, round_blocks
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.models.latent import INDEX, LATENT

PIECE_TOKENS = 4096
"""Cached latents that are expanded at a time."""
_SCORE_VALUES = 1 << 27
"""Scores of a chunk that are held at a time."""


@dataclass(frozen=True)
class LatentExpansion:
    """How a latent becomes a head's key and value; bfloat16."""

    keys: torch.Tensor
    """[heads, key values, rank]"""
    values: torch.Tensor
    """[heads, values, rank]"""
    scale: float


@dataclass(frozen=True)
class IndexerQueries:
    """What an indexer asks with."""

    layer: int
    """Index of its keys in their group."""
    q: torch.Tensor
    """[tokens, heads, dim], of the type of the keys that are scored."""
    weights: torch.Tensor
    """[tokens, heads] float32, with the queries' scales where they have some."""


@dataclass(frozen=True)
class Chosen:
    """Rows that an indexer chose: places in the pool, [queries, top_k] int32."""

    decode: torch.Tensor | None
    chunks: tuple[torch.Tensor | None, ...]
    """None where a chunk sees no more rows than would be chosen."""


@dataclass(frozen=True)
class _Chunk:
    first: int
    num_tokens: int
    start: int
    first_index: int
    num_pages: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.num_tokens)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class LatentPagedAttention:
    """A `StepAttention` over latents and, with an indexer, its keys."""

    def __init__(self, pool: CudaKVPool, num_heads: int, rank: int, top_k: int, *, fp8_scores: bool) -> None:
        """`top_k` is 0 without an indexer; with `fp8_scores` rows are scored by FP8 copies of their keys, which are
        nobody else's: what leaves and enters the pool are the keys."""
        latents = pool.slabs[LATENT]
        self._latents = [latents[:, index, 0, :, 0] for index in range(latents.shape[1])]
        keys = pool.slabs[INDEX] if top_k else latents
        self._keys = [keys[:, index, 0, :, 0] for index in range(keys.shape[1])]
        self._fast_keys: list[torch.Tensor] = []
        if fp8_scores and top_k:
            copies = torch.zeros(keys.shape, dtype=torch.float8_e4m3fn, device=keys.device)
            self._fast_keys = [copies[:, index, 0, :, 0] for index in range(keys.shape[1])]
            pool.followers.append(lambda blocks: round_blocks(keys, copies, blocks))
        self._block_size = pool.block_size
        self._num_heads, self._rank, self._top_k = num_heads, rank, top_k
        self._tiles = latent_tiles(num_heads, rank)
        processors = torch.cuda.get_device_properties(latents.device).multi_processor_count
        self._programs = max(1, processors * self._tiles.programs_per_sm)
        self._num_decode = 0
        self._chunks: tuple[_Chunk, ...] = ()

    def open(self, inputs: StepInputs) -> None:
        self._inputs = inputs.device
        items = most_items(inputs.num_rows, self._programs)
        self._part_out = torch.empty((items, self._num_heads, self._rank), dtype=torch.float32, device="cuda")
        self._part_stats = torch.empty((items, self._num_heads, 2), dtype=torch.float32, device="cuda")
        if self._top_k:
            context = inputs.device["indices"].shape[0] // inputs.num_rows * self._block_size
            self._scores = torch.empty((inputs.num_rows, context), dtype=torch.float32, device="cuda")

    def part_sizes(self, num_rows: int, num_tokens: int) -> dict[str, int]:
        items = ITEM_WORDS * most_items(num_rows, self._programs)
        programs = most_programs(num_rows, self._programs)
        return {"items": items, "item_firsts": num_rows + 1, "program_firsts": programs + 1, "lengths": num_rows + 1}

    def most_tile_words(self, num_rows: int, num_indices: int) -> int:
        return 0

    def latent_layer(self, index: int) -> torch.Tensor:
        """[blocks, block_size, rank + rope] view."""
        return self._latents[index]

    def index_layer(self, index: int) -> torch.Tensor:
        """[blocks, block_size, dim] view of an indexer's keys."""
        return self._keys[index]

    def fast_index_layer(self, index: int) -> torch.Tensor | None:
        """The same of their FP8 copies, where there are some."""
        return self._fast_keys[index] if self._fast_keys else None

    def fill(self, host: dict[str, np.ndarray], table: PageTable, counts: np.ndarray, num_decode: int) -> int:
        table.write(host)
        pages, lengths = np.diff(table.indptr), table.lengths(table.last_page_len.size, self._block_size)
        host["lengths"][: lengths.size] = lengths
        self._num_decode = num_decode
        ends = np.cumsum(counts)
        self._chunks = tuple(
            _Chunk(
                int(ends[row] - counts[row]),
                int(counts[row]),
                int(lengths[row] - counts[row]),
                int(table.indptr[row]),
                int(pages[row]),
            )
            for row in range(num_decode, counts.size)
        )
        if num_decode:
            read, firsts = lengths[:num_decode], table.indptr
            if self._top_k:
                read, firsts = np.minimum(read, self._top_k), np.arange(num_decode) * self._top_k
            plan = plan_items(read, firsts, self._programs, self._tiles.tokens)
            host["items"][: plan.items.size] = plan.items.reshape(-1)
            host["item_firsts"][: plan.item_firsts.size] = plan.item_firsts
            # Programs past the plan's have nothing to do.
            host["program_firsts"][:] = plan.program_firsts[-1]
            host["program_firsts"][: plan.program_firsts.size] = plan.program_firsts
        return 0

    def plan(self, table: PageTable, counts: np.ndarray, *, fresh: bool) -> None:
        """`fill` has said all."""

    def expect_decode(self, num_rows: int) -> None:
        self._num_decode, self._chunks = num_rows, ()

    def choose(self, asked: IndexerQueries) -> Chosen:
        """The rows that an indexer wants each token to attend to; its keys are in the pool."""
        decode = None
        if self._num_decode:
            part = slice(0, self._num_decode)
            visible, firsts = self._inputs["lengths"], self._inputs["indptr"]
            decode = self._choose(asked, part, self._scores[part], visible, firsts, one_table=False)
        return Chosen(decode, tuple(self._choose_chunk(asked, chunk) for chunk in self._chunks))

    def run(
        self, layer: int, q: torch.Tensor, q_rope: torch.Tensor, expansion: LatentExpansion, chosen: Chosen | None
    ) -> torch.Tensor:
        """[tokens, heads * values] bfloat16 for q [tokens, heads, nope + rope] and its turned part [tokens, heads,
        rope]; the tokens' rows are in the pool."""
        values = expansion.values.shape[1]
        out = torch.empty((q.shape[0], q.shape[1], values), dtype=torch.bfloat16, device=q.device)
        nope = q[..., : expansion.keys.shape[1]]
        if self._num_decode:
            part = slice(0, self._num_decode)
            out[part] = self._decode(layer, nope[part], q_rope[part], expansion, chosen.decode if chosen else None)
        picked = chosen.chunks if chosen else (None,) * len(self._chunks)
        for chunk, slots in zip(self._chunks, picked, strict=True):
            if slots is None:
                out[chunk.span] = self._chunk(layer, chunk, nope[chunk.span], q_rope[chunk.span], expansion)
            else:
                out[chunk.span] = self._chosen_chunk(
                    layer, chunk, nope[chunk.span], q_rope[chunk.span], expansion, slots
                )
        return out.flatten(1)

    def _decode(
        self, layer: int, nope: torch.Tensor, rope: torch.Tensor, expansion: LatentExpansion, slots: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = self._inputs
        plan = (inputs["items"].view(-1, ITEM_WORDS), inputs["item_firsts"], inputs["program_firsts"])
        indices = inputs["indices"] if slots is None else slots.view(-1)
        parts = (self._part_out, self._part_stats)
        return self._absorbed(layer, nope, rope, expansion, plan, indices, parts, slots is not None)

    def _chosen_chunk(
        self,
        layer: int,
        chunk: _Chunk,
        nope: torch.Tensor,
        rope: torch.Tensor,
        expansion: LatentExpansion,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        queries = torch.arange(chunk.num_tokens, dtype=torch.int32, device=nope.device)
        read = (queries + (chunk.start + 1)).clamp(max=self._top_k)
        none, only = torch.zeros_like(queries), torch.full_like(queries, WHOLE_ROW)
        items = torch.stack([queries, queries * self._top_k, none, read, only], dim=1)
        firsts = torch.arange(chunk.num_tokens + 1, dtype=torch.int32, device=nope.device)
        programs = torch.arange(self._programs + 1, device=nope.device) * chunk.num_tokens // self._programs
        plan = (items, firsts, programs.int())
        return self._absorbed(layer, nope, rope, expansion, plan, slots.view(-1), None, True)

    def _absorbed(
        self,
        layer: int,
        nope: torch.Tensor,
        rope: torch.Tensor,
        expansion: LatentExpansion,
        plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        indices: torch.Tensor,
        parts: tuple[torch.Tensor, torch.Tensor] | None,
        selected: bool,
    ) -> torch.Tensor:
        """[queries, heads, values]: queries go into latent space, what they find comes out of it."""
        absorbed = torch.bmm(nope.transpose(0, 1), expansion.keys).transpose(0, 1)
        mixed = attend_latent(
            absorbed, rope, self._latents[layer], *plan, indices, parts, expansion.scale, self._tiles,
            selected=selected,
        )  # fmt: skip
        return torch.bmm(mixed.transpose(0, 1), expansion.values.transpose(1, 2)).transpose(0, 1)

    def _chunk(
        self, layer: int, chunk: _Chunk, nope: torch.Tensor, rope: torch.Tensor, expansion: LatentExpansion
    ) -> torch.Tensor:
        """Over the chunk's own rows, then over the cached ones before them."""
        heads, values, device = nope.shape[1], expansion.values.shape[1], nope.device
        # Rounded once, where there is one piece; sums of several are kept in float32.
        dtype = torch.float32 if chunk.start else torch.bfloat16
        out = torch.empty((chunk.num_tokens, heads, values), dtype=dtype, device=device)
        lse = torch.empty((chunk.num_tokens, heads), dtype=torch.float32, device=device)
        pieces = [(chunk.start, chunk.end)]
        pieces += [(first, min(first + PIECE_TOKENS, chunk.start)) for first in range(0, chunk.start, PIECE_TOKENS)]
        for index, (first, end) in enumerate(pieces):
            rows = self._rows(layer, chunk, first, end)
            k, v = self._expand(rows, expansion)
            turned = rows[:, self._rank :]
            attend_piece(nope, rope, k, turned, v, out, lse, expansion.scale, causal=index == 0, merge=index > 0)
        return out

    def _expand(self, rows: torch.Tensor, expansion: LatentExpansion) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [rows, heads, key values] and values [rows, heads, values]."""
        latents = rows[:, : self._rank]
        k = latents @ expansion.keys.flatten(0, 1).t()
        v = latents @ expansion.values.flatten(0, 1).t()
        return k.view(len(rows), self._num_heads, -1), v.view(len(rows), self._num_heads, -1)

    def _rows(self, layer: int, chunk: _Chunk, first: int, end: int) -> torch.Tensor:
        """[end - first, rank + rope] rows of a chunk's sequence."""
        size = self._block_size
        begin = first // size
        pages = self._inputs["indices"][chunk.first_index + begin : chunk.first_index - (-end // size)]
        return self._latents[layer].index_select(0, pages).flatten(0, 1)[first - begin * size : end - begin * size]

    def _choose_chunk(self, asked: IndexerQueries, chunk: _Chunk) -> torch.Tensor | None:
        if chunk.end <= self._top_k:
            return None
        step = max(1, _SCORE_VALUES // chunk.end)
        made = []
        for first in range(0, chunk.num_tokens, step):
            count = min(step, chunk.num_tokens - first)
            part = slice(chunk.first + first, chunk.first + first + count)
            begin = chunk.start + first + 1
            visible = torch.arange(begin, begin + count, dtype=torch.int32, device=asked.q.device)
            firsts = torch.full_like(visible, chunk.first_index)
            scores = torch.empty((count, begin + count - 1), dtype=torch.float32, device=asked.q.device)
            made.append(self._choose(asked, part, scores, visible, firsts, one_table=True))
        return torch.cat(made)

    def _choose(
        self,
        asked: IndexerQueries,
        part: slice,
        scores: torch.Tensor,
        visible: torch.Tensor,
        firsts: torch.Tensor,
        *,
        one_table: bool,
    ) -> torch.Tensor:
        keys, indices = (self._fast_keys or self._keys)[asked.layer], self._inputs["indices"]
        score_rows(
            asked.q[part], asked.weights[part], keys, scores, visible, firsts, indices, self._top_k,
            one_table=one_table,
        )  # fmt: skip
        return choose_rows(scores, visible, firsts, indices, self._top_k, self._block_size)
