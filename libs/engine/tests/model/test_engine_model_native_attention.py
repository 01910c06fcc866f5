"""Attention by the C kernels equals plain torch, to the last bit however the context lies in blocks."""

from dataclasses import dataclass

import pytest
import torch

from tidemill_engine.attention.base import Chunk, ForwardBatch
from tidemill_engine.attention.native import NativeAttention
from tidemill_engine.attention.torch_reference import TorchReference
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.kv_pool import KVPool

LENGTHS = [1, 7, 8, 9, 31, 130]
"""Contexts of the decode rows; a chunk of as many tokens as the last follows them."""
SHAPES = [(9, 3, 64), (8, 8, 16), (16, 1, 96), (5, 1, 128)]
"""Query heads, KV heads, dim: groups of 3, 1, 16, 5."""


@dataclass
class Step:
    """The last token of each decode row, and a chunk, over contexts that are in the pool already."""

    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def attend(self, backend: type[TorchReference]) -> torch.Tensor:
        attention = backend(self.pool)
        attention.begin(self.batch)
        return attention.paged("kv", 1, self.q, self.k, self.v)


def make_step(shape: tuple[int, int, int], block_size: int, dtype: str) -> Step:
    """The same values for every block size."""
    heads, kv_heads, dim = shape
    random = torch.Generator().manual_seed(3)
    spec = KVGroupSpec(name="kv", kind="paged", layers=(0, 1), dtype=dtype, num_heads=kv_heads, head_values=2 * dim)
    contexts = [*LENGTHS, LENGTHS[-1]]
    counts = [-(-length // block_size) for length in contexts]
    pool = KVPool((spec,), block_size=block_size, num_blocks=sum(counts), num_slots=1, num_snapshots=0)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(block_size))
    tables = list(order.split(counts))
    layer, tokens = pool.layer("kv", 1), []
    for length, table in zip(contexts, tables, strict=True):
        both = torch.randn(2, length, kv_heads, dim, generator=random)
        where = torch.arange(length)
        for plane in (0, 1):
            layer[table[where // block_size], plane, where % block_size] = both[plane].to(layer.dtype)
        tokens.append((both, table))
    decode = tokens[:-1]
    (chunk_kv, chunk_table), first = tokens[-1], len(decode)
    positions = torch.cat([torch.tensor(LENGTHS) - 1, torch.arange(LENGTHS[-1])])
    block_ids = torch.cat(
        [torch.stack([table[-1] for _, table in decode]), chunk_table[positions[first:] // block_size]]
    )
    padded = torch.full((first, max(counts)), pool.null_block)
    for row, (_, table) in enumerate(decode):
        padded[row, : len(table)] = table
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        block_ids=block_ids,
        block_offsets=positions % block_size,
        num_decode=first,
        decode_blocks=padded,
        decode_lengths=torch.tensor(LENGTHS),
        decode_slots=torch.full((first,), -1),
        chunks=(Chunk(first, LENGTHS[-1], 0, chunk_table, -1),),
        sample_indices=torch.arange(first),
    )
    own = torch.cat([torch.stack([kv[:, -1] for kv, _ in decode], dim=1), chunk_kv], dim=1)
    # As models give them: parts of one projection.
    projected = torch.cat([torch.randn(len(positions), heads, dim, generator=random) * 2, own[0], own[1]], dim=1)
    return Step(pool, batch, *projected.split([heads, kv_heads, kv_heads], dim=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [4, 12, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_rows_and_chunks_equal_torch(shape: tuple[int, int, int], block_size: int, dtype: str) -> None:
    step = make_step(shape, block_size, dtype)
    torch.testing.assert_close(step.attend(NativeAttention), step.attend(TorchReference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decode_row_is_the_same_to_the_last_bit_in_blocks_of_any_size(
    shape: tuple[int, int, int], dtype: str
) -> None:
    # Tokens are met in runs, which end with a block at the latest.
    rows = [make_step(shape, size, dtype).attend(NativeAttention)[: len(LENGTHS)] for size in (1, 4, 12, 32)]
    assert all(torch.equal(rows[0], other) for other in rows[1:])
