"""Kernels of DeepSeek-V4's residual, compressors and attention over poisoned pools, against the CPU engine's layers.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_stream_kernels.py` runs the same on a CPU, slowly.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import os
from collections.abc import Iterator

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tidemill_engine.attention.compressed import Compressor, _means
from tidemill_engine.attention.parts import attend_part, merge
from tidemill_engine.cuda.kernels.hyper import Mixing, collapse, hyper_site, spread_weigh
from tidemill_engine.cuda.kernels.stream_attend import StreamRows, StreamTiles, attend_streams, stream_tiles
from tidemill_engine.cuda.kernels.stream_store import StepTokens, compress, keep, norm_turn
from tidemill_engine.layers.hyper import HyperConnection, HyperHead, Mixed, spread, unit_rms
from tidemill_engine.layers.rotary import PairRotary
from tidemill_engine.models.rope_config import RopeConfig

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
INTERPRETED = DEVICE == "cpu"
BF16_BOUND = 8e-3
NAN = float("nan")
BLOCK = 16


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    reference = reference.to(out.device, torch.float64)
    return float((out.double() - reference).norm() / reference.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def ints(values: list[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values).to(DEVICE, torch.int32)


@pytest.mark.parametrize("tokens", [3] if INTERPRETED else [3, 300])
@pytest.mark.parametrize(("count", "hidden"), [(3, 96), (4, 320)])
def test_streams_are_spread_weighed_and_collapsed(count: int, hidden: int, tokens: int) -> None:
    rows = count * (2 + count)
    matrix, base, scale = torch.randn(rows, count * hidden) * 0.1, torch.randn(rows), torch.rand(3) + 0.5
    exact = HyperConnection(matrix, base, scale, norm_eps=1e-6, eps=1e-5, steps=6)
    site = hyper_site(
        matrix.to(DEVICE), base.to(DEVICE), scale.to(DEVICE), norm_eps=1e-6, eps=1e-5, steps=6
    )  # fmt: skip
    norm = torch.rand(hidden) + 0.5
    streams, output = random(tokens, count, hidden), random(tokens, hidden)
    post, comb = torch.rand(tokens, count), torch.rand(tokens, count, count)
    for made, mixing in ((None, None), (output, Mixing(post.to(DEVICE), comb.to(DEVICE)))):
        new, parts = spread_weigh(streams, made, mixing, site)
        expected = streams.float().cpu()
        if made is not None:
            expected = spread(Mixed(expected, post, comb), made.float().cpu(), expected)
        assert error(new, expected) < BF16_BOUND
        x, mixed = collapse(new, parts, site, norm.to(DEVICE), 1e-5)
        wanted = exact(new.float().cpu())
        normed = torch.nn.functional.rms_norm(wanted.collapsed, (hidden,), norm, 1e-5)
        assert error(x, normed) < BF16_BOUND
        assert error(mixed.post, wanted.post) < 1e-4
        assert error(mixed.comb, wanted.comb) < 1e-4


def test_the_last_sum_over_the_streams_has_one_kind_of_weights() -> None:
    count, hidden, tokens = 4, 160, 5
    matrix, base, scale = torch.randn(count, count * hidden) * 0.1, torch.randn(count), torch.rand(1) + 0.5
    site = hyper_site(
        matrix.to(DEVICE), base.to(DEVICE), scale.to(DEVICE), norm_eps=1e-6, eps=1e-5, steps=0
    )  # fmt: skip
    streams, norm = random(tokens, count, hidden), torch.rand(hidden) + 0.5
    new, parts = spread_weigh(streams, None, None, site)
    x, _ = collapse(new, parts, site, norm.to(DEVICE), 1e-5)
    wanted = HyperHead(matrix, base, scale, norm_eps=1e-6, eps=1e-5)(streams.float().cpu())
    assert error(x, torch.nn.functional.rms_norm(wanted, (hidden,), norm, 1e-5)) < BF16_BOUND


def rotary(dim: int) -> PairRotary:
    return PairRotary(RopeConfig(kind="default", theta=10000.0), dim)


def step_angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary(dim).at(positions)
    return cos[:, 0].contiguous().to(DEVICE), sin[:, 0].contiguous().to(DEVICE)


@pytest.mark.parametrize(("heads", "width", "turning"), [(11, 32, 8), (1, 64, 16), (1, 48, 0)])
@pytest.mark.parametrize("kind", ["plain", "unit", "weighted"])
def test_heads_are_normed_and_their_ends_turned_in_pairs(heads: int, width: int, turning: int, kind: str) -> None:
    tokens = 6
    # A slice of a wider product.
    x = random(tokens, heads * width + 24)[:, 8 : 8 + heads * width]
    norm = torch.rand(width) + 0.5
    positions = torch.randperm(5000)[:tokens]
    out = norm_turn(
        x,
        heads,
        norm=norm.to(DEVICE) if kind == "weighted" else None,
        unit_norm=kind == "unit",
        eps=1e-6,
        angles=step_angles(positions, turning) if turning else None,
    )
    expected = x.float().cpu().view(tokens, heads, width)
    if kind != "plain":
        expected = unit_rms(expected, 1e-6)
    if kind == "weighted":
        expected = expected * norm
    if turning:
        expected = rotary(turning).turn(expected, rotary(turning).at(positions))
    assert error(out, expected) < BF16_BOUND


class Steps:
    """Sequences that are computed in steps of several rows; sequence i lies in slot i + 1 and in shuffled blocks."""

    def __init__(self, lengths: list[int], parts: list[list[int]]) -> None:
        self.lengths, self.parts = lengths, parts
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts)).tolist()
        self.blocks = [torch.tensor([order.pop() for _ in range(count)]) for count in counts]
        self.num_blocks = sum(counts)
        firsts = torch.tensor([0, *counts]).cumsum(0)
        self.indptr, self.indices = ints(firsts), ints(torch.cat(self.blocks))

    def __iter__(self) -> Iterator[tuple[list[slice], StepTokens]]:
        """Each sequence's part of a step, and the step's tokens."""
        ends = [0] * len(self.lengths)
        for counts in zip(*self.parts, strict=True):
            starts = list(ends)
            ends = [start + count for start, count in zip(starts, counts, strict=True)]
            spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
            positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            blocks = torch.cat(
                [self.blocks[i][torch.arange(span.start, span.stop) // BLOCK] for i, span in enumerate(spans)]
            )
            firsts = torch.tensor([0, *counts]).cumsum(0)[:-1]
            yield (
                spans,
                StepTokens(
                    ints(positions), ints(blocks), ints(rows), ints(starts), ints(firsts), ints(ends),
                    ints([i + 1 for i in range(len(counts))]),
                ),
            )  # fmt: skip
        assert ends == self.lengths


PARTS = [[21, 1, 1, 1, 18, 1], [1, 1, 30, 2, 1, 14]]
LENGTHS = [sum(parts) for parts in PARTS]


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False)])
def test_runs_become_the_same_rows_however_prompts_are_cut(ratio: int, overlap: bool) -> None:
    dim, turning, steps = 32, 8, Steps(LENGTHS, PARTS)
    channels, size = dim * (2 if overlap else 1), ratio * (2 if overlap else 1)
    bias, norm = torch.randn(ratio, channels), torch.rand(dim) + 0.5
    made = [random(length, 2 * channels) for length in LENGTHS]
    slab = torch.full((steps.num_blocks + 1, 2, 1, BLOCK // ratio, 1, dim), NAN).to(DEVICE, torch.bfloat16)
    layer = slab[:, 1, 0, :, 0]
    state = torch.full((len(LENGTHS) + 1, 2, size * 2 * channels), NAN).to(DEVICE)[:, 1]
    for spans, tokens in steps:
        step = torch.cat([values[span] for values, span in zip(made, spans, strict=True)])
        step = torch.cat([random(len(step), 8), step], dim=1)[:, 8:]
        angles = step_angles(tokens.positions.cpu() - (ratio - 1), turning)
        compress(
            step, state, layer, norm.to(DEVICE), 1e-6, bias.to(DEVICE), angles, tokens, ratio=ratio, overlap=overlap
        )
        keep(step, state, size, tokens)
    assert bool(state[0].isnan().all())
    for i, length in enumerate(LENGTHS):
        known = torch.cat([torch.zeros(size - ratio, 2 * channels), made[i].float().cpu()]).view(-1, 2, channels)
        count = length // ratio
        runs = torch.stack([known[run * ratio : run * ratio + size] for run in range(count)])
        means = _means(Compressor("", ratio, overlap, bias), runs, torch.arange(count) == 0)
        normed = torch.nn.functional.rms_norm(means, (dim,), norm, 1e-6)
        turn = rotary(turning)
        expected = turn.turn(normed[:, None], turn.at(torch.arange(count) * ratio))[:, 0]
        places = torch.arange(count)
        stored = layer[steps.blocks[i][places * ratio // BLOCK].to(DEVICE), (places % (BLOCK // ratio)).to(DEVICE)]
        assert error(stored, expected) < BF16_BOUND
    complete = sum(length // ratio for length in LENGTHS)
    assert int((~layer.isnan()).all(-1).sum()) == complete


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
@pytest.mark.parametrize(("heads", "dim"), [(5, 32)] if INTERPRETED else [(5, 32), (64, 512), (128, 512)])
def test_tokens_attend_to_their_window_the_stream_and_a_sink(heads: int, dim: int, kind: str, splits: int) -> None:
    turning, window, ratio, top_k = dim // 8 if dim > 32 else 8, 12, 4, 6
    tiles = StreamTiles(16, 4, 2) if dim == 32 else stream_tiles(dim)
    steps = Steps(LENGTHS, PARTS)
    slab = torch.full((steps.num_blocks + 1, 1, 1, BLOCK // ratio, 1, dim), NAN).to(DEVICE, torch.bfloat16)
    layer = slab[:, 0, 0, :, 0]
    streams = [random(length // ratio, dim) for length in LENGTHS]
    for i, rows in enumerate(streams):
        places = torch.arange(len(rows))
        layer[steps.blocks[i][places * ratio // BLOCK].to(DEVICE), (places % (BLOCK // ratio)).to(DEVICE)] = rows
    q, own = [random(n, heads, dim) for n in LENGTHS], [random(n, dim) for n in LENGTHS]
    rings = torch.full((len(LENGTHS) + 1, 3, window * dim), NAN).to(DEVICE, torch.bfloat16)[:, 1]
    sinks, turn = torch.randn(heads), rotary(turning)
    for spans, tokens in steps:
        asked, rows = (torch.cat([v[s] for v, s in zip(values, spans, strict=True)]) for values in (q, own))
        positions, owner = tokens.positions.cpu().long(), tokens.rows.cpu().long()
        visible = (positions + 1) // ratio
        chosen = torch.full((len(rows), top_k), -7, dtype=torch.int32)
        picked = []
        for t, (seen, i) in enumerate(zip(visible.tolist(), owner.tolist(), strict=True)):
            places = torch.randperm(seen)[:top_k].sort().values
            blocks = steps.blocks[i][places * ratio // BLOCK]
            chosen[t, : len(places)] = (blocks * (BLOCK // ratio) + places % (BLOCK // ratio)).int()
            picked.append(places if kind == "chosen" else torch.arange(seen))
        stream = StreamRows(layer, ints(visible), chosen.to(DEVICE) if kind == "chosen" else None)
        out = attend_streams(
            asked, rows, rings, window, None if kind == "window" else stream, sinks.to(DEVICE),
            step_angles(positions, turning), tokens, steps.indptr, steps.indices, splits, tiles,
        )  # fmt: skip
        keep(rows, rings, window, tokens)
        for t, (position, i) in enumerate(zip(positions.tolist(), owner.tolist(), strict=True)):
            keys = own[i][max(0, position - window + 1) : position + 1].float().cpu()
            if kind != "window":
                keys = torch.cat([keys, streams[i].float().cpu()[picked[t]]])
            attended = merge([attend_part(asked[t].float().cpu(), keys, keys, None, dim**-0.5)], sinks)
            exact = turn.turn_back(attended[None], turn.at(torch.tensor([position])))[0]
            assert error(out[t], exact) < 1.5 * BF16_BOUND, (kind, t, position)
    assert bool(rings[0].isnan().all())


def test_rows_that_fill_a_graph_up_keep_nothing() -> None:
    size, width = 4, 8
    target = torch.full((3, size * width), NAN).to(DEVICE)
    one = ints([0, 0])
    tokens = StepTokens(one, one, ints([0, 1]), one, ints([0, 1]), ints([1, 1]), ints([-1, 2]))
    keep(random(2, width), target, size, tokens)
    assert int(target.isfinite().sum()) == width
    assert bool(target[2, :width].isfinite().all())
