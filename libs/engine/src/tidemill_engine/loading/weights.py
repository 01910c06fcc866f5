"""A rank's part of each matrix of a checkpoint, in the weight format that the settings name."""

from collections.abc import Callable, Sequence

import torch

from tidemill_engine.layers.elementwise import Elementwise
from tidemill_engine.layers.linear import Linear
from tidemill_engine.loading.checkpoint import TensorSource
from tidemill_engine.parallel.tp import TensorParallel

MakeLinear = Callable[[str, torch.Tensor, torch.Tensor | None], Linear]
"""(name, weight [out, in] as stored, bias) -> matrix in memory."""


class WeightSource:
    """Cuts tensors to the rank's share while it reads them."""

    def __init__(
        self, checkpoint: TensorSource, tp: TensorParallel, make_linear: MakeLinear, elementwise: Elementwise
    ) -> None:
        self.checkpoint = checkpoint
        self.elementwise = elementwise
        self.tp = tp
        self._make_linear = make_linear

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, whole on every rank, float32."""
        return self.checkpoint.take(name, (size,)).float()

    def whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A small tensor, whole on every rank, float32."""
        return self.checkpoint.take(name, shape).float()

    def integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """A table of numbers in [0, below), whole on every rank, int64."""
        return self.checkpoint.take_integers(name, shape, below)

    def replicated(self, name: str, rows: int, width: int, *, bias: bool = False) -> Linear:
        """A matrix that every rank holds whole."""
        weight = self.checkpoint.take(f"{name}.weight", (rows, width))
        return self._make_linear(name, weight, self.vector(f"{name}.bias", rows) if bias else None)

    def embedding(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Whole on every rank, as stored."""
        return self.checkpoint.take(name, (rows, columns))

    def columns(self, names: Sequence[str], rows: Sequence[int], width: int, *, bias: bool = False) -> Linear:
        """Matrices that split by output row, one under another; `rows` are those of the whole model."""
        shares = [self.tp.share(f"rows of {name}", count) for name, count in zip(names, rows, strict=True)]
        parts = zip(names, rows, shares, strict=True)
        weights = [
            self.checkpoint.take(f"{name}.weight", (count, width), start=start, end=end)
            for name, count, (start, end) in parts
        ]
        return self._make_linear(names[0], torch.cat(weights), self._column_bias(names, rows, shares) if bias else None)

    def row(self, name: str, rows: int, width: int, *, bias: bool = False) -> Linear:
        """A matrix that splits by input column; outputs are summed over the ranks, so only the leader adds the bias."""
        start, end = self.tp.share(f"columns of {name}", width)
        weight = self.checkpoint.take(f"{name}.weight", (rows, width), axis=1, start=start, end=end)
        adds = bias and self.tp.is_leader
        return self._make_linear(name, weight, self.vector(f"{name}.bias", rows) if adds else None)

    def blocks(self, name: str, count: int, rows: int, width: int) -> list[Linear]:
        """This rank's of `count` matrices of [rows, width] that are stored one under another."""
        start, end = self.tp.share(f"blocks of {name}", count)
        full = f"{name}.weight"
        parts = [
            self.checkpoint.take(full, (count * rows, width), start=i * rows, end=(i + 1) * rows)
            for i in range(start, end)
        ]
        return [self._make_linear(name, part, None) for part in parts]

    def head(self, name: str, rows: int, width: int) -> Linear:
        """The output matrix, split by vocabulary."""
        start, end = self.tp.share("vocab_size", rows)
        return self._make_linear(name, self.checkpoint.take(name, (rows, width), start=start, end=end), None)

    def _column_bias(
        self, names: Sequence[str], rows: Sequence[int], shares: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        parts = zip(names, rows, shares, strict=True)
        biases = [
            self.checkpoint.take(f"{name}.bias", (count,), start=start, end=end) for name, count, (start, end) in parts
        ]
        return torch.cat(biases).float()
