"""Attention over a window and compressed streams: single tokens and chunks alike, token by token.

What a step's tokens see of each other and of the tokens before them is found by their positions on the device, so that
nothing here depends on how prompts were cut; only an indexer's scores of a chunk are made for that chunk, since their
size is bounded.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tidemill_engine.cuda.attention import PageTable
from tidemill_engine.cuda.kernels.index_scores import score_rows
from tidemill_engine.cuda.kernels.row_choice import choose_rows
from tidemill_engine.cuda.kernels.stream_attend import StreamRows, attend_streams, splits_for, stream_tiles
from tidemill_engine.cuda.kernels.stream_store import Angles, StepTokens, compress, keep
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.kv_pool import KVPool
from tidemill_engine.layers.rotary import inverse_frequencies
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.streams import INDEX, SPARSE, STATES, WINDOW

_SCORE_VALUES = 1 << 27
"""Scores of a chunk that are held at a time."""


@dataclass(frozen=True)
class CompressorWeights:
    """How runs of a stream become rows."""

    group: str
    ratio: int
    overlap: bool
    bias: torch.Tensor
    """[ratio, channels] float32."""
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True)
class _Chunk:
    first: int
    num_tokens: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StreamPagedAttention:
    """A `StepAttention` over a window ring, compressed streams and their compressors' state."""

    def __init__(self, pool: KVPool, config: ModelConfig) -> None:
        streams = config.streams
        assert streams is not None
        self._slabs = pool.slabs
        self._block_size, self._window = pool.block_size, streams.window_tokens
        self._num_heads, self._top_k = config.num_heads, streams.index_top_k
        self._per_row = {spec.name: spec.tokens_per_row for spec in pool.groups}
        device = pool.slabs[WINDOW].device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._tiles = stream_tiles(config.head_dim)
        # Angles of the window's layers, of the streams' layers, and of the first tokens of the streams' runs.
        ratios = sorted({self._per_row[name] for name in STATES if name in pool.slabs})
        self._places = {1 - ratio: index for index, ratio in enumerate(ratios, 2)}
        ropes = [config.rope, *[streams.stream_rope] * (1 + len(ratios))]
        made = [inverse_frequencies(rope, streams.rope_dim) for rope in ropes]
        self._frequencies = torch.stack([frequencies for frequencies, _ in made])[:, None].to(device)
        self._factors = torch.tensor([factor for _, factor in made])[:, None, None].to(device)
        self._shifts = torch.tensor([0, 0, *self._places])[:, None].to(device)
        self._ratios = ratios
        self._num_decode = 0
        self._chunks: tuple[_Chunk, ...] = ()

    def open(self, inputs: StepInputs) -> None:
        self._inputs = inputs.device
        if SPARSE in self._slabs:
            context = inputs.device["indices"].shape[0] // inputs.num_rows * self._block_size
            shape = (inputs.num_rows, context // self._per_row[SPARSE])
            self._scores = torch.empty(shape, dtype=torch.float32, device="cuda")

    def part_sizes(self, num_rows: int, num_tokens: int) -> dict[str, int]:
        by_row = dict.fromkeys(("starts", "firsts", "lengths", "slots"), num_rows + 1)
        return by_row | {"token_rows": num_tokens}

    def most_tile_words(self, num_rows: int, num_indices: int) -> int:
        return 0

    def fill(self, host: dict[str, np.ndarray], table: PageTable, counts: np.ndarray, num_decode: int) -> int:
        table.write(host)
        lengths, ends = table.lengths(counts.size, self._block_size), np.cumsum(counts)
        by_row = {"starts": lengths - counts, "firsts": ends - counts, "lengths": lengths, "slots": table.slots}
        for name, values in by_row.items():
            host[name][: values.size] = values
        host["token_rows"][: ends[-1]] = np.repeat(np.arange(counts.size), counts)
        self._num_decode = num_decode
        self._chunks = tuple(
            _Chunk(int(ends[row] - counts[row]), int(counts[row]), int(lengths[row] - counts[row]))
            for row in range(num_decode, counts.size)
        )
        return 0

    def plan(self, table: PageTable, counts: np.ndarray, *, fresh: bool) -> None:
        """`fill` has said all."""

    def expect_decode(self, num_rows: int) -> None:
        self._num_decode, self._chunks = num_rows, ()

    def start(self, positions: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Makes what all layers of a step share."""
        inputs = self._inputs
        rows = inputs["token_rows"][: positions.shape[0]]
        self._tokens = StepTokens(
            positions, block_ids, rows, inputs["starts"], inputs["firsts"], inputs["lengths"], inputs["slots"]
        )
        angles = (positions[None] + self._shifts)[..., None] * self._frequencies
        self._cos, self._sin = angles.cos() * self._factors, angles.sin() * self._factors
        self._visible = {ratio: (positions + 1) // ratio for ratio in self._ratios}
        self._first_pages = inputs["indptr"][rows]
        self._splits = splits_for(positions.shape[0], self._num_heads, self._processors)

    def angles(self, *, has_stream: bool) -> Angles:
        """Of the step's tokens, in layers with a stream or without."""
        return self._cos[int(has_stream)], self._sin[int(has_stream)]

    def compress(self, layer: int, made: torch.Tensor, how: CompressorWeights) -> None:
        """Stores the rows that the step completes and keeps what the next ones need of made [tokens, values and
        gates]."""
        state = self._slabs[STATES[how.group]][:, layer, 0]
        place = self._places[1 - how.ratio]
        compress(
            made, state, self._rows(how.group, layer), how.norm, how.eps, how.bias,
            (self._cos[place], self._sin[place]), self._tokens, ratio=how.ratio, overlap=how.overlap,
        )  # fmt: skip
        keep(made, state, how.ratio * (2 if how.overlap else 1), self._tokens)

    def choose(self, layer: int, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, top_k] int32 places of the rows that an indexer wants each token to attend to: the first of
        min(complete rows, top_k). q [tokens, heads, dim] bfloat16, weights [tokens, heads] float32."""
        made = []
        if self._num_decode:
            made.append(self._choose(layer, q, weights, slice(0, self._num_decode), self._scores, one_table=False))
        for chunk in self._chunks:
            width = max(1, chunk.end // self._per_row[INDEX])
            step = max(1, _SCORE_VALUES // width)
            for first in range(chunk.first, chunk.first + chunk.num_tokens, step):
                part = slice(first, min(first + step, chunk.first + chunk.num_tokens))
                scores = torch.empty((part.stop - part.start, width), dtype=torch.float32, device=q.device)
                made.append(self._choose(layer, q, weights, part, scores, one_table=True))
        return made[0] if len(made) == 1 else torch.cat(made)

    def run(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor, stream: tuple[str, int] | None,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """[tokens, heads, dim] like q; `rows` [tokens, dim] are the step's own, which go into the ring. `stream` is
        a group and its layer, `slots` what an indexer chose of it."""
        seen = None
        if stream is not None:
            seen = StreamRows(self._rows(*stream), self._visible[self._per_row[stream[0]]], slots)
        rings = self._slabs[WINDOW][:, layer].flatten(1)
        out = attend_streams(
            q, rows, rings, self._window, seen, sinks, self.angles(has_stream=stream is not None), self._tokens,
            self._inputs["indptr"], self._inputs["indices"], self._splits, self._tiles,
        )  # fmt: skip
        keep(rows, rings, self._window, self._tokens)
        return out

    def _rows(self, group: str, layer: int) -> torch.Tensor:
        """[blocks, rows, dim] view."""
        return self._slabs[group][:, layer, 0, :, 0]

    def _choose(
        self, layer: int, q: torch.Tensor, weights: torch.Tensor, part: slice, scores: torch.Tensor, *, one_table: bool
    ) -> torch.Tensor:
        keys, indices = self._rows(INDEX, layer), self._inputs["indices"]
        visible, firsts = self._visible[self._per_row[INDEX]][part], self._first_pages[part]
        scores = scores[: part.stop - part.start]
        score_rows(
            q[part], weights[part], keys, scores, visible, firsts, indices, self._top_k, one_table=one_table
        )  # fmt: skip
        return choose_rows(scores, visible, firsts, indices, self._top_k, keys.shape[1])
