"""Kernels of latent attention and its indexer over shuffled, poisoned blocks, against float32 and float64.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_latent_kernels.py` runs the same on a CPU, slowly.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tidemill_engine.attention.parts import attend_part, merge
from tidemill_engine.attention.row_store import strongest
from tidemill_engine.cuda.item_plan import plan_items
from tidemill_engine.cuda.kernels.index_scores import score_rows
from tidemill_engine.cuda.kernels.latent_chunk import attend_piece
from tidemill_engine.cuda.kernels.latent_decode import LatentTiles, attend_latent
from tidemill_engine.cuda.kernels.latent_store import store_index, store_latent
from tidemill_engine.cuda.kernels.row_choice import choose_by_passes, choose_rows
from tidemill_engine.layers.rotary import pairs_to_halves, rotate

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BF16_BOUND = 8e-3
FP8_BOUND = 0.07 if DEVICE == "cpu" else 0.04
"""Of values with three bits behind the point; the interpreter cuts the others off."""
BLOCK = 16
NAN = float("nan")
Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    reference = reference.to(out.device, torch.float64)
    return float((out.double() - reference).norm() / reference.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


class Rows:
    """Random rows of some sequences in shuffled blocks of layer 1 of a slab full of NaN."""

    def __init__(self, lengths: list[int], dim: int) -> None:
        counts = [-(-length // BLOCK) for length in lengths]
        slab = torch.full((sum(counts) + 1, 2, 1, BLOCK, 1, dim), NAN).to(DEVICE, torch.bfloat16)
        self.layer = slab[:, 1, 0, :, 0]
        order = torch.randperm(sum(counts)).tolist()
        self.contents, self.blocks = [], []
        for length, count in zip(lengths, counts, strict=True):
            blocks = torch.tensor([order.pop() for _ in range(count)])
            values = random(length, dim)
            places = torch.arange(length)
            self.layer[blocks[places // BLOCK].to(DEVICE), (places % BLOCK).to(DEVICE)] = values
            self.blocks.append(blocks)
            self.contents.append(values.float().cpu())
        self.indices = torch.cat(self.blocks).int().to(DEVICE)
        self.indptr = np.concatenate([[0], np.cumsum(counts)])


def cut(lengths: list[int], indptr: np.ndarray, programs: int, tile: int) -> tuple[torch.Tensor, ...]:
    """Items with room for more, their firsts by row, and by program with programs that have none."""
    plan = plan_items(np.array(lengths), indptr, programs, tile)
    items = torch.full((plan.items.shape[0] + 3, 5), 1 << 20, dtype=torch.int32)
    items[: plan.items.shape[0]] = torch.from_numpy(plan.items)
    by_program = np.append(plan.program_firsts, [plan.program_firsts[-1]] * 2).astype(np.int32)
    return items.to(DEVICE), *(torch.from_numpy(firsts).to(DEVICE) for firsts in (plan.item_firsts, by_program))


def scratch(items: torch.Tensor, heads: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (items.shape[0], heads)
    return torch.full((*shape, rank), NAN).to(DEVICE), torch.full((*shape, 2), NAN).to(DEVICE)


INTERPRETED = DEVICE == "cpu"
SHAPES = [(4, 64, 16), (16, 128, 32), (64, 64, 16), (40, 64, 16)]
FULL_SHAPES = [] if INTERPRETED else [(16, 512, 64), (64, 512, 64), (80, 512, 64)]
TILES = [LatentTiles(tokens=32, warps=4, stages=2, programs_per_sm=1)]
if not INTERPRETED:
    TILES += [
        LatentTiles(tokens=32, warps=8, stages=3, programs_per_sm=1, reads_once=True),
        LatentTiles(tokens=64, warps=8, stages=2, programs_per_sm=1, reads_once=True),
    ]


@pytest.mark.parametrize("programs", [14] if INTERPRETED else [3, 14, 132])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("heads", "rank", "rope"), SHAPES + FULL_SHAPES)
def test_decode_over_blocks_merges_its_items(
    heads: int, rank: int, rope: int, tiles: LatentTiles, programs: int
) -> None:
    lengths = [1, 16, 17, 130, 257, 64] if INTERPRETED else [1, 16, 17, 130, 257, 64, 63, 65, 5000]
    rows, scale = Rows(lengths, rank + rope), (rank + rope) ** -0.5
    items, firsts, by_program = cut(lengths, rows.indptr, programs, tiles.tokens)
    assert int(firsts[-1]) > len(lengths)
    # Heads first, as the product into latent space leaves them.
    q_latent, q_rope = random(heads, len(lengths), rank).transpose(0, 1), random(len(lengths), heads, rope)
    out = attend_latent(
        q_latent, q_rope, rows.layer, items, firsts, by_program, rows.indices, scratch(items, heads, rank), scale,
        tiles, selected=False,
    )  # fmt: skip
    q = torch.cat([q_latent, q_rope], dim=-1).float().cpu()
    for i, kept in enumerate(rows.contents):
        assert error(out[i], attend_part(q[i], kept, kept[:, :rank], None, scale).out) < BF16_BOUND, lengths[i]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_decode_over_chosen_rows_reads_those_only(tiles: LatentTiles) -> None:
    heads, rank, rope, top_k = 16, 64, 16, 24
    lengths = [5, 24, 90, 200]
    rows, scale = Rows(lengths, rank + rope), 0.11
    slots = torch.full((len(lengths), top_k), -7, dtype=torch.int32)
    chosen = [torch.randperm(length)[:top_k].sort().values for length in lengths]
    for i, places in enumerate(chosen):
        slots[i, : len(places)] = (rows.blocks[i][places // BLOCK] * BLOCK + places % BLOCK).int()
    reads = np.minimum(lengths, top_k)
    items, firsts, by_program = cut(reads.tolist(), np.arange(len(lengths)) * top_k, 6, tiles.tokens)
    q_latent, q_rope = random(len(lengths), heads, rank), random(len(lengths), heads, rope)
    out = attend_latent(
        q_latent, q_rope, rows.layer, items, firsts, by_program, slots.to(DEVICE).view(-1),
        scratch(items, heads, rank), scale, tiles, selected=True,
    )  # fmt: skip
    q = torch.cat([q_latent, q_rope], dim=-1).float().cpu()
    for i, places in enumerate(chosen):
        kept = rows.contents[i][places]
        assert error(out[i], attend_part(q[i], kept, kept[:, :rank], None, scale).out) < BF16_BOUND, lengths[i]


@pytest.mark.parametrize(("nope", "values"), [(32, 32), (48, 80)])
@pytest.mark.parametrize("count", [1, 70, 150])
def test_chunks_merge_the_pieces_of_their_context(nope: int, values: int, count: int) -> None:
    heads, rope, scale = 3, 16, 0.2
    before = [0, 40, 99]
    q, q_rope = random(count, heads, nope + rope)[..., :nope], random(count, heads, rope)
    out = torch.full((count, heads, values), NAN).to(DEVICE)
    lse = torch.full((count, heads), NAN).to(DEVICE)
    parts = []
    for index, keys in enumerate([count, *np.diff(before).tolist()]):
        k, v, shared = random(keys, heads, nope), random(keys, heads, values), random(keys, 8 + rope)[:, 8:]
        attend_piece(q, q_rope, k, shared, v, out, lse, scale, causal=index == 0, merge=index > 0)
        hidden = torch.ones(count, keys, dtype=torch.bool).triu(1) if index == 0 else None
        query = torch.cat([q, q_rope], dim=-1).float().cpu().transpose(0, 1)
        key = torch.cat([k, shared[:, None].expand(-1, heads, -1)], dim=-1).float().cpu().transpose(0, 1)
        parts.append(attend_part(query, key, v.float().cpu().transpose(0, 1), hidden, scale))
    assert error(out, merge(parts).transpose(0, 1)) < BF16_BOUND


@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_are_normed_turned_and_stored(interleaved: bool) -> None:
    tokens, heads, nope, rank, rope = 9, 11, 48, 64, 16
    q, kv = random(tokens, heads, nope + rope), random(tokens, rank + rope)
    layer = Rows([160], rank + rope).layer.fill_(NAN)
    positions, blocks = torch.randperm(100)[:tokens], torch.randperm(10)[:tokens]
    angles = torch.rand(128, rope // 2).to(DEVICE) * 6
    norm = torch.rand(rank).to(DEVICE) + 0.5
    out = store_latent(
        q, kv, layer, positions.int().to(DEVICE), blocks.int().to(DEVICE), angles.cos(), angles.sin(), norm, 1e-6,
        interleaved=interleaved,
    )  # fmt: skip
    cos, sin = [part[positions].repeat(1, 2)[:, None] for part in (angles.cpu().cos(), angles.cpu().sin())]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rotate(pairs_to_halves(x) if interleaved else x, cos, sin)

    assert error(out, turned(q[..., nope:].float().cpu())) < BF16_BOUND
    stored = layer[blocks.to(DEVICE), (positions % BLOCK).to(DEVICE)]
    plain = kv[:, :rank].double().cpu()
    normed = plain * torch.rsqrt((plain**2).mean(-1, keepdim=True) + 1e-6) * norm.double().cpu()
    assert error(stored[:, :rank], normed) < BF16_BOUND
    assert error(stored[:, rank:], turned(kv[:, None, rank:].float().cpu())[:, 0]) < BF16_BOUND
    assert int(layer.isnan().all(-1).sum()) == layer.shape[0] * BLOCK - tokens


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_keys_are_layer_normed_turned_and_stored(interleaved: bool, fp8: bool) -> None:
    tokens, heads, dim, rope = 7, 5, 64, 16
    q, key = random(tokens, heads, dim), random(tokens, dim) * 0.003
    layer = Rows([160], dim).layer.fill_(NAN)
    positions, blocks = torch.randperm(100)[:tokens], torch.randperm(10)[:tokens]
    angles = torch.rand(128, rope // 2).to(DEVICE) * 6
    norm, bias = torch.rand(dim).to(DEVICE) + 0.5, torch.rand(dim).to(DEVICE)
    fast = torch.zeros(layer.shape, dtype=torch.uint8).to(DEVICE).view(torch.float8_e4m3fn) if fp8 else None
    out, scales = store_index(
        q, key, layer, positions.int().to(DEVICE), blocks.int().to(DEVICE), angles.cos(), angles.sin(), (norm, bias),
        1e-6, interleaved=interleaved, fast_layer=fast,
    )  # fmt: skip
    cos, sin = [part[positions].repeat(1, 2)[:, None] for part in (angles.cpu().cos(), angles.cpu().sin())]

    def turned(x: torch.Tensor) -> torch.Tensor:
        part = pairs_to_halves(x[..., :rope]) if interleaved else x[..., :rope]
        return torch.cat([rotate(part, cos, sin), x[..., rope:]], dim=-1)

    if fast is None:
        assert scales is None
        assert error(out, turned(q.float().cpu())) < BF16_BOUND
    else:
        assert scales is not None
        assert error(out.float() * scales[..., None], turned(q.float().cpu())) < FP8_BOUND
        assert float(out.float().abs().amax(-1).min()) == 448
    normed = torch.nn.functional.layer_norm(key.float().cpu(), (dim,), norm.cpu(), bias.cpu(), 1e-6)
    stored = layer[blocks.to(DEVICE), (positions % BLOCK).to(DEVICE)]
    assert error(stored, turned(normed[:, None])[:, 0]) < BF16_BOUND
    assert int(layer.isnan().all(-1).sum()) == layer.shape[0] * BLOCK - tokens
    if fast is not None and not INTERPRETED:
        copied = fast.view(torch.uint8)[blocks.to(DEVICE), (positions % BLOCK).to(DEVICE)]
        assert torch.equal(copied, stored.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    products = torch.relu(q.float().cpu() @ keys.T * q.shape[-1] ** -0.5)
    return (weights.cpu()[:, None] @ products)[:, 0]


def test_scores_of_single_tokens_and_of_a_chunk() -> None:
    heads, dim, top_k = 12, 64, 8
    lengths = [300, 5, 700]
    rows = Rows(lengths, dim)
    q, weights = random(3, heads, dim), torch.randn(3, heads).to(DEVICE)
    scores = torch.full((3, 768), NAN).to(DEVICE)
    firsts = ints(rows.indptr[:-1].tolist())
    score_rows(q, weights, rows.layer, scores, ints(lengths), firsts, rows.indices, top_k, one_table=False)
    for i in (0, 2):
        exact = index_scores(q[i : i + 1], weights[i : i + 1], rows.contents[i])[0]
        assert error(scores[i, : lengths[i]], exact) < BF16_BOUND
        assert bool(scores[i, lengths[i] :].isnan().all())
    assert bool(scores[1].isnan().all()), "nothing is to be chosen there"
    start = 300
    for count in [19] if INTERPRETED else [19, 300]:
        q, weights = random(count, heads, dim), torch.randn(count, heads).to(DEVICE)
        scores = torch.full((count, start + count), NAN).to(DEVICE)
        visible = list(range(start + 1, start + count + 1))
        firsts = ints([int(rows.indptr[2])] * count)
        score_rows(q, weights, rows.layer, scores, ints(visible), firsts, rows.indices, top_k, one_table=True)
        exact = index_scores(q, weights, rows.contents[2][: start + count])
        for i, seen in enumerate(visible):
            assert error(scores[i, :seen], exact[i, :seen]) < BF16_BOUND


@pytest.mark.parametrize("one_table", [True, False])
def test_scores_by_fp8_keys_choose_nearly_the_same_rows(one_table: bool) -> None:
    heads, dim, top_k, length = 32, 128, 64, 700
    rows = Rows([length], dim)
    count = 5 if one_table else 1
    q, weights = random(count, heads, dim), torch.randn(count, heads).abs().to(DEVICE)
    visible = list(range(length - count + 1, length + 1))
    exact = index_scores(q, weights, rows.contents[0])
    fast = rows.layer.float().nan_to_num(0.0).to(torch.float8_e4m3fn)
    scales = q.float().abs().amax(-1) / 448
    fast_q = (q.float() / scales[..., None]).to(torch.float8_e4m3fn)
    scores = torch.full((count, length), NAN).to(DEVICE)
    firsts = ints([0] * count)
    score_rows(
        fast_q, weights * scales, fast, scores, ints(visible), firsts, rows.indices, top_k, one_table=one_table
    )  # fmt: skip
    for i, seen in enumerate(visible):
        assert error(scores[i, :seen], exact[i, :seen]) < FP8_BOUND
        expected, chosen = (set(strongest(s[i : i + 1, :seen], top_k)[0].tolist()) for s in (exact, scores.cpu()))
        assert len(expected & chosen) > 0.85 * top_k


@pytest.mark.parametrize("choose", [choose_rows] if INTERPRETED else [choose_rows, choose_by_passes])
@pytest.mark.parametrize("top_k", [24, 2048])
def test_the_best_rows_are_those_of_the_cpu_engine(top_k: int, choose: Choose) -> None:
    visible = [1, top_k - 1, top_k, top_k + 1, 3000, 9000]
    width, table = 9216, torch.randperm(1000)[: 9216 // BLOCK].int()
    scores = torch.full((len(visible), width), NAN)
    for i, seen in enumerate(visible):
        scores[i, :seen] = torch.randn(seen)
    # Ties at the threshold, zeros of both signs among them, and scores all alike.
    scores[4, :3000] = scores[4, :3000].mul(2).round().div(2)
    scores[4, 1:3000:3] *= -0.0
    scores[5, :9000] = 0.25
    firsts = ints([0] * len(visible))
    slots = choose(scores.to(DEVICE), ints(visible), firsts, table.to(DEVICE), top_k, BLOCK).cpu()
    for i, seen in enumerate(visible):
        count = min(seen, top_k)
        places = strongest(scores[i : i + 1, :seen], count)[0]
        expected = table[places // BLOCK] * BLOCK + places % BLOCK
        assert torch.equal(slots[i, :count].long(), expected.long()), seen


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ has no interpreter")
@pytest.mark.parametrize("queries", [1, 3, 64, 300])
def test_many_blocks_of_a_query_choose_the_same_rows(queries: int) -> None:
    # Odd widths, scores of few and of many values, all blocks of a cluster and few of them with rows.
    top_k, width = 2048, 70_001
    table = torch.randperm(10_000)[: -(-width // BLOCK)].int().to(DEVICE)
    visible = torch.randint(top_k - 1, width + 1, (queries,)).to(DEVICE, torch.int32)
    visible[0] = width
    firsts = torch.zeros_like(visible)
    for levels in (3.0, 100.0, 1e9):
        scores = (torch.randn(queries, width, device=DEVICE) * levels).round() / levels
        expected = choose_by_passes(scores, visible, firsts, table, top_k, BLOCK)
        slots = choose_rows(scores, visible, firsts, table, top_k, BLOCK)
        for i, seen in enumerate(visible.tolist()):
            assert torch.equal(slots[i, : min(seen, top_k)], expected[i, : min(seen, top_k)]), (levels, i, seen)
