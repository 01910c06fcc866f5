"""Attention over the pool's per-layer view: single tokens, and prompt chunks.

| rows | kernel |
|---|---|
| single tokens | `kernels.split_decode` |
| chunks that begin their requests | FlashInfer over the K and V of the projection |
| other chunks | FlashInfer over the pool; `kernels.paged_attention` where the pool holds FP8 |
| all rows, batch-invariant | `kernels.paged_attention` |

FlashInfer's `plan()` copies from one pinned buffer of its wrapper without waiting, so the caller must know that the
step before has read it before it plans again (`StepInputs.wait`).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from tidemill_engine.cuda.decode_plan import most_items, plan_decode
from tidemill_engine.cuda.kernels.paged_attention import paged_attention, tile_tokens
from tidemill_engine.cuda.kernels.rotary_store import HeadShape
from tidemill_engine.cuda.kernels.split_decode import DecodeTiles, DecodeWork, split_decode
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.kv_pool import KVPool

_WORKSPACE_BYTES = 384 << 20


@dataclass(frozen=True)
class PageTable:
    """Blocks of some rows on the host, in CSR form, and their sequence slots; all int32."""

    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray
    slots: np.ndarray
    """-1 for rows without sequence state, and for those that fill a graph up."""

    def rows_from(self, first: int) -> "PageTable":
        """The table without its first rows."""
        start = self.indptr[first]
        return PageTable(
            self.indptr[first:] - start, self.indices[start:], self.last_page_len[first:], self.slots[first:]
        )

    def write(self, host: dict[str, np.ndarray]) -> None:
        """Into a step's numbers."""
        for name, values in (("indptr", self.indptr), ("last_page_len", self.last_page_len), ("indices", self.indices)):
            host[name][: values.size] = values

    def lengths(self, num_rows: int, block_size: int) -> np.ndarray:
        """[num_rows] int64: tokens of the first rows."""
        pages = np.diff(self.indptr[: num_rows + 1]).astype(np.int64)
        lengths: np.ndarray = (pages - 1) * block_size + self.last_page_len[:num_rows]
        return lengths

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as host tensors."""
        return torch.from_numpy(self.indptr), torch.from_numpy(self.indices), torch.from_numpy(self.last_page_len)


class StepAttention(Protocol):
    """What the runner asks of a model's attention; `fill` and `plan` say what the next forward pass attends to."""

    def open(self, inputs: StepInputs) -> None:
        """Takes the tensors that `fill` fills, and scratch memory."""

    def part_sizes(self, num_rows: int, num_tokens: int) -> dict[str, int]:
        """Parts of a step's numbers that are the attention's, for so many rows and tokens of prompts."""

    def most_tile_words(self, num_rows: int, num_indices: int) -> int:
        """Words of the tiles of decode rows, which are sent apart: most steps have few."""

    def fill(self, host: dict[str, np.ndarray], table: PageTable, counts: np.ndarray, num_decode: int) -> int:
        """Writes what the device needs: rows compute `counts` tokens each, the last of their contexts; the first
        `num_decode` rows one each. Rows without a block of their own hold one token in the null block. Returns how many
        words of `tiles` are to be sent."""

    def plan(self, table: PageTable, counts: np.ndarray, *, fresh: bool) -> None:
        """Plans chunks, which follow the decode rows of `fill`; `fresh` when all begin their requests."""

    def expect_decode(self, num_rows: int) -> None:
        """The passes that are captured next hold so many decode rows, whose numbers `fill` has written."""


class PagedAttention:
    """One group's attention."""

    def __init__(
        self,
        pool: KVPool,
        group: str,
        heads: HeadShape,
        *,
        batch_invariant: bool = False,
        prefill_backend: str = "fa3",
    ) -> None:
        slab = pool.slabs[group]
        self._layers = [slab[:, index] for index in range(slab.shape[1])]
        self._heads = heads
        self._block_size = pool.block_size
        self._is_invariant = batch_invariant
        self._is_fp8 = slab.dtype == torch.float8_e4m3fn
        self._scale = float(heads.dim**-0.5)
        self._tiles = DecodeTiles()
        processors = torch.cuda.get_device_properties(slab.device).multi_processor_count
        self.num_groups = max(1, processors * self._tiles.programs_per_sm // heads.num_kv_heads)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=slab.device)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend)
        self._fresh_prefill = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend)
        self.wants_keys = False
        """Chunks attend to their own K and V only, read from the projection rather than from the pool."""
        self._num_decode = 0
        self._num_tiles = 0

    def open(self, inputs: StepInputs) -> None:
        device = inputs.device
        self._work = DecodeWork(device["group_firsts"], device["tiles"], device["item_firsts"], device["indices"])
        self._inputs = device
        items, heads = most_items(inputs.num_rows, self.num_groups), self._heads.num_heads
        self._part_out = torch.empty((items, heads, self._heads.dim), dtype=torch.float32, device="cuda")
        self._part_stats = torch.empty((items, heads, 2), dtype=torch.float32, device="cuda")

    def part_sizes(self, num_rows: int, num_tokens: int) -> dict[str, int]:
        tiles = num_tokens // self._tile_tokens + num_rows
        sizes = {"group_firsts": self.num_groups + 1, "item_firsts": num_rows + 1, "q_indptr": num_rows + 1}
        return sizes | {"tile_rows": tiles, "tile_firsts": tiles}

    def most_tile_words(self, num_rows: int, num_indices: int) -> int:
        return 4 * (num_indices * self._block_size // self._tiles.tokens + num_rows)

    def layer(self, index: int) -> torch.Tensor:
        """[blocks, 2, block_size, kv heads, dim] view of one layer."""
        return self._layers[index]

    def fill(self, host: dict[str, np.ndarray], table: PageTable, counts: np.ndarray, num_decode: int) -> int:
        table.write(host)
        self._num_decode, self._num_tiles = num_decode, 0
        if self._is_invariant:
            self._fill_tiles(host, counts, 0)
            return 0
        words = 0
        if num_decode:
            lengths = table.lengths(num_decode, self._block_size)
            plan = plan_decode(lengths, table.indptr, self.num_groups, self._tiles.tokens, self._block_size)
            for name in ("group_firsts", "tiles", "item_firsts"):
                values = getattr(plan, name).reshape(-1)
                host[name][: values.size] = values
            words = plan.tiles.size
        if self._is_fp8 and num_decode < counts.size:
            self._fill_tiles(host, counts, num_decode)
        return words

    def plan(self, table: PageTable, counts: np.ndarray, *, fresh: bool) -> None:
        first = self._num_decode
        has_chunks = first < counts.size
        self.wants_keys = fresh and has_chunks and not self._is_invariant
        if self.wants_keys:
            self._num_tiles = 0
        if not has_chunks or self._num_tiles:
            return
        delimiters = torch.from_numpy(np.concatenate([[0], np.cumsum(counts[first:])]).astype(np.int32))
        shape = (self._heads.num_heads, self._heads.num_kv_heads, self._heads.dim)
        types = {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if self.wants_keys:
            self._fresh_prefill.plan(delimiters, delimiters, *shape, **types)
        else:
            self._prefill.plan(delimiters, *table.rows_from(first).tensors(), *shape, self._block_size, **types)

    def expect_decode(self, num_rows: int) -> None:
        self._num_decode, self.wants_keys = num_rows, False
        self._num_tiles = num_rows if self._is_invariant else 0

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] like q; K and V of these tokens are in the pool already, and `kv` [tokens, 2 * kv heads,
        dim] holds them too where `wants_keys` says so."""
        view, first = self._layers[layer], self._num_decode
        out = torch.empty_like(q)
        if self._is_invariant:
            self._run_tiles(q, view, out)
            return out
        if first:
            split_decode(
                q[:first], view, out[:first], self._work, self._part_out, self._part_stats, self._scale, self._tiles
            )
        if first == q.shape[0]:
            return out
        if self.wants_keys:
            k, v = kv[first:].chunk(2, dim=1)
            self._fresh_prefill.run(q[first:], k, v, out=out[first:])
        elif self._num_tiles:
            self._run_tiles(q, view, out)
        else:
            self._prefill.run(q[first:], view, out=out[first:])
        return out

    @property
    def _tile_tokens(self) -> int:
        return tile_tokens(self._heads.num_heads, self._heads.num_kv_heads)

    def _fill_tiles(self, host: dict[str, np.ndarray], counts: np.ndarray, first_row: int) -> None:
        size = self._tile_tokens
        tiles = -(-counts[first_row:] // size)
        rows = np.repeat(np.arange(first_row, counts.size), tiles)
        self._num_tiles = rows.size
        host["tile_rows"][: rows.size] = rows
        host["tile_firsts"][: rows.size] = (np.arange(rows.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size
        host["q_indptr"][0] = 0
        host["q_indptr"][1 : counts.size + 1] = np.cumsum(counts)

    def _run_tiles(self, q: torch.Tensor, view: torch.Tensor, out: torch.Tensor) -> None:
        numbers = self._inputs
        paged_attention(
            q,
            view,
            out,
            numbers["tile_rows"][: self._num_tiles],
            numbers["tile_firsts"][: self._num_tiles],
            numbers["q_indptr"],
            numbers["indptr"],
            numbers["indices"],
            numbers["last_page_len"],
            self._scale,
        )
