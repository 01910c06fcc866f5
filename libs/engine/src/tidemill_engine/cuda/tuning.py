"""Measures which way of multiplying is fastest for each shape and each size of a decode graph.

A product is timed with what follows it, since parts are summed there, inside a graph over several layers' matrices, so
that no weight is read from a cache.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import structlog
import torch

from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.gemv import MOST_TOKENS, GemvTiles, fits_gated, gated_gemv, gemv
from tidemill_engine.cuda.kernels.matmul import Tiles
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.linear import Choices, DeviceLinear, GatedLinear, Way, by_library, by_tiles
from tidemill_engine.cuda.timing import graph_ms

if TYPE_CHECKING:
    from tidemill_engine.cuda.loading import CudaDecoder

log = structlog.get_logger()

TUNED_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
"""Graphs of other sizes take the choice of the next larger one."""
_MARGIN = 0.98
"""What another way must come to, of the library's time, to be taken."""
_LEAST_BYTES = 200 << 20
"""Weights that a timed graph reads, several times the device's cache."""
_GEMVS = tuple(GemvTiles(values, warps) for values, warps in ((8192, 4), (16384, 4), (16384, 8), (32768, 8)))

M = TypeVar("M")


def tune(model: "CudaDecoder", sizes: Sequence[int]) -> None:
    """Fills the choices of the model's matrices for the sizes of decode graphs."""
    started = time.perf_counter()
    by_shape: dict[int, list[DeviceLinear]] = {}
    for matrix in model.matrices():
        by_shape.setdefault(id(matrix.choices), []).append(matrix)
    gated = list(model.gated())
    gates = {id(pair.linear.choices) for pair in gated}
    for pair in gated:
        pair.choices = gated[0].choices
    for tokens in _tuned(sizes):
        covered = _covered(sizes, tokens)
        for key, matrices in by_shape.items():
            _choose(matrices, tokens, covered, key in gates)
        if tokens <= MOST_TOKENS and gated:
            _choose_gated(gated, tokens, covered)
        _choose_head(model, tokens, covered)
    chosen = {
        f"{matrices[0].weight.values.shape[0]}x{matrices[0].weight.values.shape[1]}": {
            tokens: matrices[0].choices.by_tokens[tokens].name for tokens in _tuned(sizes)
        }
        for matrices in by_shape.values()
    }
    log.info("products_tuned", seconds=round(time.perf_counter() - started, 2), chosen=chosen)


def _tuned(sizes: Sequence[int]) -> list[int]:
    """Sizes that are measured: those of the list up to the largest graph, and that one."""
    return [*(size for size in TUNED_SIZES if size < sizes[-1]), sizes[-1]]


def _covered(sizes: Sequence[int], tokens: int) -> list[int]:
    """Graphs that take the choice of `tokens`."""
    below = max((size for size in _tuned(sizes) if size < tokens), default=0)
    return [size for size in sizes if below < size <= tokens]


def _tiles(tokens: int) -> list[Tiles]:
    """Shapes that were worth trying at so many tokens on an H200."""
    if tokens <= 32:
        m = 16 if tokens <= 16 else 32
        narrow = [Tiles(64, m, 128, splits, 4, 4, 3) for splits in (2, 4)]
        return [*(Tiles(128, m, 128, splits, 4, 4, 3) for splits in (1, 2, 4, 8)), *narrow]
    if tokens <= 64:
        wide = [Tiles(128, 64, 128, splits, 4, 4) for splits in (1, 2, 4)]
        # The last one leaves room for two programs on a processor.
        return [*(Tiles(64, 64, 128, splits, 4, 4) for splits in (1, 2, 3, 4)), *wide, Tiles(128, 64, 64, 1, 4, 3)]
    if tokens <= 128:
        return [Tiles(128, 128, 64, splits, 4, 4) for splits in (1, 2, 4)]
    return []


def _ways(matrix: DeviceLinear, tokens: int) -> list[Way[DeviceLinear]]:
    weight = matrix.weight
    tiles = _tiles(tokens)
    if weight.scale is not None:
        # Narrower steps along K than a block of scales have no place for them.
        tiles = [tile for tile in tiles if tile.k == 128] or [Tiles(128, 128, 128, s, 8, 3) for s in (1, 2)]
    ways = [by_tiles(tile) for tile in tiles]
    if not weight.is_by_block:
        ways.insert(0, by_library())
    if tokens <= MOST_TOKENS and not weight.is_by_block:
        ways += [_by_gemv(tile) for tile in _GEMVS]
    return ways


def _by_gemv(tiles: GemvTiles) -> Way[DeviceLinear]:
    return Way(
        f"gemv {tiles.values} w{tiles.warps}",
        lambda matrix, x: gemv(x, matrix.weight.values, matrix.bias, tiles, matrix.weight.scale),
    )


def _choose(matrices: list[DeviceLinear], tokens: int, covered: list[int], gates: bool) -> None:
    outputs, width = matrices[0].weight.values.shape
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    hidden = torch.zeros(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(outputs, device="cuda")

    def run(way: Way[DeviceLinear]) -> None:
        for matrix in _enough(matrices, matrices[0].num_bytes):
            product = way.run(matrix, x)
            if gates:
                silu_mul(product)
            else:
                add_rms_norm(hidden, product, norm, 1e-5)

    _take_fastest(matrices[0].choices, _ways(matrices[0], tokens), run, covered)


def _choose_gated(gated: list[GatedLinear], tokens: int, covered: list[int]) -> None:
    weight = gated[0].linear.weight
    if (
        gated[0].limit
        or weight.is_by_block
        or gated[0].linear.bias is not None
        or not fits_gated(weight.values.shape[1])
    ):
        return
    x = torch.randn(tokens, weight.values.shape[1], device="cuda", dtype=torch.bfloat16)

    def run(way: Way[GatedLinear]) -> None:
        for pair in _enough(gated, gated[0].linear.num_bytes):
            way.run(pair, x)

    fused = [_by_gated_gemv(tiles) for tiles in _GEMVS]
    _take_fastest(gated[0].choices, [gated[0].choices.default, *fused], run, covered)


def _by_gated_gemv(tiles: GemvTiles) -> Way[GatedLinear]:
    return Way(
        f"gated gemv {tiles.values} w{tiles.warps}",
        lambda pair, x: gated_gemv(x, pair.linear.weight.values, tiles, pair.linear.weight.scale),
    )


def _choose_head(model: "CudaDecoder", tokens: int, covered: list[int]) -> None:
    head, (vocab, width) = model.head, model.head.weight.shape
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, vocab, device="cuda")
    times: list[tuple[float, Tiles | None]] = []
    for tiles in (None, *(tile for tile in _tiles(tokens) if tile.splits == 1)):
        head.tiles.pop(tokens, None)
        if tiles is not None:
            head.tiles[tokens] = tiles
        times.append((graph_ms(lambda: head(x, out)) * (1.0 if tiles is None else 1 / _MARGIN), tiles))
    head.tiles.pop(tokens, None)
    _, best = min(times, key=lambda entry: entry[0])
    if best is not None:
        head.tiles.update(dict.fromkeys(covered, best))


def _take_fastest(choices: Choices[M], ways: list[Way[M]], run: Callable[[Way[M]], None], covered: list[int]) -> None:
    """The first way is the one to beat."""
    times = [graph_ms(lambda way=way: run(way)) for way in ways]  # type: ignore[misc]
    best = min(range(len(ways)), key=lambda i: times[i] if i == 0 else times[i] / _MARGIN)
    choices.by_tokens.update(dict.fromkeys(covered, ways[best]))


def _enough(matrices: Sequence[M], num_bytes: int) -> list[M]:
    return list(islice(matrices, max(2, -(-_LEAST_BYTES // num_bytes))))
