"""FlashInfer over the pool's per-layer view: decode rows and prompt chunks, each planned once a step for all layers.

Decode runs on tensor cores whatever the head shape: at two query heads for each KV head it is as fast as the other
kernel at batch 1 (1.55 against 1.52 ms a step of Qwen3-0.6B on an H200), and that one hung in replays of a captured
graph at batch 64 (FlashInfer 0.6.14).

`plan()` copies from one pinned buffer of its wrapper without waiting, so the caller must know that the step before has
read it before it plans again (`StepInputs.wait`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from flashinfer.decode import fast_decode_plan

from tidemill_engine.cuda.kernels.rotary_store import HeadShape
from tidemill_engine.kv_pool import KVPool

_WORKSPACE_BYTES = 384 << 20


@dataclass(frozen=True)
class PageTable:
    """Blocks of some rows on the host, in FlashInfer's CSR form; all int32."""

    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as host tensors."""
        return torch.from_numpy(self.indptr), torch.from_numpy(self.indices), torch.from_numpy(self.last_page_len)


class PagedAttention:
    """One group's attention; `plan_*` says what the next forward pass attends to."""

    def __init__(
        self,
        pool: KVPool,
        group: str,
        heads: HeadShape,
        *,
        prefill_backend: str = "fa3",
    ) -> None:
        slab = pool.slabs[group]
        self._layers = [slab[:, index] for index in range(slab.shape[1])]
        self._heads = heads
        self._block_size = pool.block_size
        self._dtype = slab.dtype
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=slab.device)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend)
        self._fresh_prefill = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend)
        self.wants_keys = False
        """Chunks attend to their own K and V only, read from the projection rather than from the pool."""
        self._eager_decode = BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        self._decode: Any = self._eager_decode
        self._num_decode = 0

    def layer(self, index: int) -> torch.Tensor:
        """[blocks, 2, block_size, kv heads, dim] view of one layer."""
        return self._layers[index]

    def plan(
        self, decode: PageTable | None, chunks: PageTable | None, chunk_indptr: np.ndarray, *, fresh: bool
    ) -> None:
        """Decode rows first, then chunks whose tokens `chunk_indptr` (int32, from 0) delimits; `fresh` when all chunks
        are the beginnings of their requests."""
        self._decode = self._eager_decode
        self._num_decode = 0
        if decode is not None:
            self._num_decode = len(decode.last_page_len)
            self._plan_decode(self._eager_decode, decode)
        self.wants_keys = fresh and chunks is not None
        delimiters = torch.from_numpy(chunk_indptr)
        if self.wants_keys:
            self._fresh_prefill.plan(
                delimiters,
                delimiters,
                self._heads.num_heads,
                self._heads.num_kv_heads,
                self._heads.dim,
                causal=True,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        elif chunks is not None:
            self._prefill.plan(
                delimiters,
                *chunks.tensors(),
                self._heads.num_heads,
                self._heads.num_kv_heads,
                self._heads.dim,
                self._block_size,
                causal=True,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    def graph_wrapper(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> Any:
        """A wrapper of a fixed number of rows that reads its page table from these device tensors."""
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )

    def plan_first(self, wrapper: Any, table: PageTable) -> None:
        """A graph wrapper's first plan, which also builds and binds its kernels; attends through it from now on."""
        self._decode, self._num_decode, self.wants_keys = wrapper, len(table.last_page_len), False
        self._plan_decode(wrapper, table)

    def plan_replay(self, wrapper: Any, table: PageTable) -> None:
        """Plans a captured wrapper whose device tensors the caller has filled (or will, before the replay)."""
        indptr, indices, last_page_len = table.tensors()
        fast_decode_plan(
            wrapper,
            indptr,
            indices,
            last_page_len,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.dim,
            self._block_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            global_override_indptr_cpu=indptr,
        )

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] like q; K and V of these tokens are in the pool already, and `kv` [tokens, 2 * kv heads,
        dim] holds them too where `wants_keys` says so."""
        view, first = self._layers[layer], self._num_decode
        if first == q.shape[0]:
            return self._decode.run(q, view)  # type: ignore[no-any-return]
        out = torch.empty_like(q)
        if first:
            self._decode.run(q[:first], view, out=out[:first])
        if self.wants_keys:
            k, v = kv[first:].chunk(2, dim=1)
            self._fresh_prefill.run(q[first:], k, v, out=out[first:])
        else:
            self._prefill.run(q[first:], view, out=out[first:])
        return out

    def _plan_decode(self, wrapper: Any, table: PageTable) -> None:
        wrapper.plan(
            *table.tensors(),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.dim,
            self._block_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
