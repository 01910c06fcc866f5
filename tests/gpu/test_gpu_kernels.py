"""Each kernel against a float32 or float64 reference, over poisoned outputs, the slab's strides and shuffled blocks."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from tidemill_engine.attention.torch_reference import attend, causal_hidden
from tidemill_engine.cuda.attention import PagedAttention, PageTable
from tidemill_engine.cuda.kernels.draw import draw_tokens
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.kernels.rotary_store import HeadShape, rotate_store
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.kv_pool import KVPool
from tidemill_engine.layers.rotary import rotate
from tidemill_engine.sampling.philox import uniform

BF16_BOUND = 8e-3


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    reference = reference.to(out.device, torch.float64)
    return float((out.double() - reference).norm() / reference.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [576, 1024, 4096])
def test_the_norm_adds_the_residual_in_place(size: int) -> None:
    hidden, delta, weight = random(33, size), random(33, size), torch.rand(size, device="cuda") + 0.5
    total = hidden.double() + delta.double()
    normed = total * torch.rsqrt((total**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    out = add_rms_norm(hidden, delta, weight, 1e-5)
    assert error(out, normed) < BF16_BOUND
    assert error(hidden, total) < BF16_BOUND


def test_the_gate_multiplies() -> None:
    gate_up = random(17, 2 * 3000)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert error(silu_mul(gate_up), torch.nn.functional.silu(gate) * up) < BF16_BOUND


def make_pool(heads: int, dim: int, block_size: int = 16, num_blocks: int = 512, layers: int = 3) -> CudaKVPool:
    """A pool full of NaN."""
    spec = KVGroupSpec(
        name="kv", kind="paged", layers=tuple(range(layers)), dtype="bfloat16", num_heads=heads, head_values=2 * dim
    )
    pool = CudaKVPool((spec,), block_size=block_size, num_blocks=num_blocks, num_slots=1, num_snapshots=0)
    pool.slabs["kv"].fill_(float("nan"))
    return pool


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize(("with_norms", "keep_keys"), [(False, False), (True, True)])
def test_rotation_writes_only_its_tokens_into_the_pool(
    q_heads: int, kv_heads: int, dim: int, with_norms: bool, keep_keys: bool
) -> None:
    tokens, pool = 37, make_pool(kv_heads, dim)
    qkv = random(tokens, (q_heads + 2 * kv_heads) * dim)
    positions = torch.randperm(500, device="cuda")[:tokens].int()
    block_ids = torch.randperm(512, device="cuda")[:tokens].int()
    angles = torch.rand(500, dim // 2, device="cuda") * 6
    norms = (torch.rand(dim, device="cuda") + 0.5, torch.rand(dim, device="cuda") + 0.5) if with_norms else None
    shape = HeadShape(q_heads, kv_heads, dim)
    layer = pool.slabs["kv"][:, 1]
    heads = qkv.float().view(tokens, -1, dim)
    tables = angles.cos(), angles.sin()
    q = rotate_store(qkv, layer, positions, block_ids, *tables, norms, 1e-6, shape, keep_keys=keep_keys)
    rq, rk, rv = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if norms:
        rq, rk = (torch.nn.functional.rms_norm(x, (dim,), w, 1e-6) for x, w in zip((rq, rk), norms, strict=True))
    at = torch.cat([angles, angles], -1)[positions.long()][:, None]
    assert error(q, rotate(rq, at.cos(), at.sin())) < BF16_BOUND
    where = (block_ids.long(), slice(None), positions.long() % 16)
    assert error(layer[where][:, 0], rotate(rk, at.cos(), at.sin())) < BF16_BOUND
    assert torch.equal(layer[where][:, 1].float(), rv)
    kept = qkv.float().view(tokens, -1, dim)
    expected = torch.cat(
        [heads[:, :q_heads], rotate(rk, at.cos(), at.sin()) if keep_keys else heads[:, q_heads:-kv_heads], rv], 1
    )
    assert error(kept, expected) < BF16_BOUND
    assert int(pool.slabs["kv"].isfinite().sum()) == tokens * 2 * kv_heads * dim


def csr(tables: list[list[int]], lengths: list[int], block_size: int) -> PageTable:
    indptr = np.cumsum([0, *(len(table) for table in tables)]).astype(np.int32)
    last = np.array([(n - 1) % block_size + 1 for n in lengths], np.int32)
    return PageTable(indptr, np.array([b for table in tables for b in table], np.int32), last, last)


def fill(pool: CudaKVPool, lengths: list[int]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Random KV of some sequences in shuffled blocks of layer 1; returns tables and [length, 2, heads, dim]."""
    order, size = torch.randperm(pool.num_blocks).tolist(), pool.block_size
    layer = pool.slabs["kv"][:, 1]
    tables, contents = [], []
    for length in lengths:
        table = [order.pop() for _ in range(-(-length // size))]
        values = random(length, 2, *layer.shape[3:])
        positions = torch.arange(length, device="cuda")
        layer[torch.tensor(table, device="cuda")[positions // size], :, positions % size] = values
        tables.append(table)
        contents.append(values)
    return tables, contents


def prepare(attention: PagedAttention, table: PageTable, counts: list[int], num_decode: int, *, fresh: bool) -> None:
    """What the runner does before a pass."""
    rows, tokens = len(counts), sum(counts)
    size = table.indices.size
    tile_words = attention.most_tile_words(rows, size)
    inputs = StepInputs(tokens, rows, size, tile_words, attention.part_sizes(rows, tokens))
    attention.open(inputs)
    inputs.send(size, attention.fill(inputs.host, table, np.array(counts), num_decode))
    attention.plan(table, np.array(counts), fresh=fresh)


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_attention_reads_shuffled_blocks_of_a_strided_slab(group: int, backend: str) -> None:
    kv_heads, dim, pool = 8, 128, make_pool(8, 128)
    lengths = [1, 16, 17, 300, 1000, 513]
    chunk = [0, 0, 0, 0, 900, 100]
    tables, contents = fill(pool, lengths)
    attention = PagedAttention(pool, "kv", HeadShape(kv_heads * group, kv_heads, dim), prefill_backend=backend)
    prepare(attention, csr(tables, lengths, 16), [max(1, count) for count in chunk], 4, fresh=False)
    q = random(4 + sum(chunk), kv_heads * group, dim)
    out = attention.run(1, q, torch.full((len(q), 2 * kv_heads, dim), float("nan"), device="cuda").bfloat16())
    first = 0
    for length, count, kv in zip(lengths, chunk, contents, strict=True):
        queries = q[first : first + max(1, count)].cpu()
        hidden = causal_hidden(length - len(queries), len(queries), 0, length)
        k, v = kv[:, 0].float().cpu(), kv[:, 1].float().cpu()
        reference = attend(queries.float()[None], k[None], v[None], hidden)[0]
        assert error(out[first : first + len(queries)], reference) < BF16_BOUND, (length, count)
        first += len(queries)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_whole_prompts_attend_to_the_projections_own_keys(backend: str) -> None:
    pool, heads, lengths = make_pool(8, 128), HeadShape(32, 8, 128), [300, 1, 77]
    attention = PagedAttention(pool, "kv", heads, prefill_backend=backend)
    tables, _ = fill(pool, [40])
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    prepare(attention, csr([*tables, [0], [0], [0]], [40, 1, 1, 1], 16), [1, *lengths], 1, fresh=True)
    qkv = random(1 + sum(lengths), 48, 128)
    q = qkv[:, :32].contiguous()
    out = attention.run(1, q, qkv[:, 32:])
    for first, length in zip(1 + indptr, lengths, strict=False):
        part = slice(first, first + length)
        k, v = qkv[part, 32:].float().cpu().chunk(2, dim=1)
        reference = attend(q[part].float().cpu()[None], k[None], v[None], causal_hidden(0, length, 0, length))[0]
        assert error(out[part], reference) < BF16_BOUND, length


def test_draws_are_the_cpu_samplers() -> None:
    rows, vocab = 256, 151_936
    logits = 3 * torch.randn(rows, vocab, device="cuda")
    temperature = torch.full((rows,), 0.6, device="cuda")
    temperature[::4] = 0
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,))
    counts = torch.arange(rows, dtype=torch.int32)
    out = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    order, by_row = torch.randperm(rows, device="cuda").int(), torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    draw_tokens(logits, temperature, seeds.cuda(), counts.cuda(), order, out, by_row)
    assert torch.equal(by_row[order.long()], out)
    tokens = out.long()
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    numbers = uniform(seeds.numpy().view(np.uint64), counts.numpy().astype(np.int64))
    probs = torch.softmax(logits.double() / temperature.where(~greedy, torch.ones(1, device="cuda"))[:, None], -1)
    ends = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0].cpu()
    starts = ends - probs.gather(1, tokens[:, None])[:, 0].cpu()
    target, drawn = torch.from_numpy(numbers), ~greedy.cpu()
    assert bool((starts[drawn] <= target[drawn] + 1e-6).all())
    assert bool((ends[drawn] >= target[drawn] - 1e-6).all())


def test_canonical_bytes_are_the_cpu_pools() -> None:
    spec = KVGroupSpec(name="kv", kind="paged", layers=(0, 1), dtype="bfloat16", num_heads=4, head_values=128)
    pools = [kind((spec,), block_size=8, num_blocks=12, num_slots=1, num_snapshots=0) for kind in (KVPool, CudaKVPool)]
    cpu, gpu = pools
    cpu.slabs["kv"].normal_()
    gpu.slabs["kv"].copy_(cpu.slabs["kv"])
    assert np.array_equal(gpu.gather([7, 2, 9], 1, 3), cpu.gather([7, 2, 9], 1, 3))
    as_float = cpu.slabs["kv"][[7, 2]][..., 1:3, :].float().numpy().view(np.uint8).reshape(-1)
    gpu.scatter(as_float, [3, 4], 1, 3, "float32")
    assert torch.equal(gpu.slabs["kv"][[3, 4]][..., 1:3, :].cpu(), cpu.slabs["kv"][[7, 2]][..., 1:3, :])
    with pytest.raises(ValueError, match="do not fit"):
        gpu.scatter(as_float[:-1], [3, 4], 1, 3, "float32")
