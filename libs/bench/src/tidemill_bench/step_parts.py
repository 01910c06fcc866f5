"""Where the device's time in a decode step goes: attention, matrix products, the rest.

Kernels start before those in front of them end, so that their own times do not add up. Attention is what a captured
step takes less without it, products are timed alone one after the other, the rest is what remains.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tidemill_engine.cuda.attention import PagedAttention, PageTable
from tidemill_engine.cuda.mlp import DenseMlp
from tidemill_engine.cuda.model import CudaModel
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.cuda.timing import graph_ms


@dataclass(frozen=True)
class StepParts:
    """Milliseconds of one step."""

    whole: float
    attention: float
    products: float

    @property
    def rest(self) -> float:
        """Norms, rotation, gate, draw, and what overlaps less than alone."""
        return self.whole - self.attention - self.products


@torch.inference_mode()
def step_parts(runner: CudaModelRunner, batch: int, context: int) -> StepParts:
    """A decode step of `batch` rows with contexts of `context` tokens in shuffled blocks."""
    assert runner.graphs is not None
    runner._bind_graph(batch)
    per_row = -(-context // runner.pool.block_size)
    blocks = np.random.default_rng(0).permutation(runner.num_blocks)[: batch * per_row].astype(np.int32)
    last = np.full(batch, (context - 1) % runner.pool.block_size + 1, np.int32)
    table = PageTable(np.arange(batch + 1, dtype=np.int32) * per_row, blocks, last, np.full(batch, -1, np.int32))
    runner.inputs.wait()
    runner._send(table, np.ones(batch, np.int64), batch)
    runner.inputs.mark_sent()
    runner.paged.expect_decode(batch)
    whole = graph_ms(lambda: runner._record_decode(batch))
    paged = runner.paged
    assert isinstance(paged, PagedAttention)
    attend = paged.run
    paged.run = lambda layer, q, kv: q  # type: ignore[method-assign]
    try:
        without = graph_ms(lambda: runner._record_decode(batch))
    finally:
        paged.run = attend  # type: ignore[method-assign]
    return StepParts(whole, whole - without, _products_ms(runner, batch))


def _products_ms(runner: CudaModelRunner, batch: int) -> float:
    model = runner.cuda_model
    assert isinstance(model, CudaModel), "latents are measured by `kernels`"
    dense = [(layer, layer.mlp) for layer in model.layers if isinstance(layer.mlp, DenseMlp)]
    assert len(dense) == len(model.layers), "experts are measured by `kernels`"
    layer, mlp = dense[0]

    def inputs(width: int) -> torch.Tensor:
        return torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)

    hidden, attended = (inputs(matrix.weight.values.shape[1]) for matrix in (layer.qkv, layer.out))
    inner = inputs(mlp.down.weight.values.shape[1])

    def run() -> None:
        for layer, mlp in dense:
            layer.qkv(hidden)
            layer.out(attended)
            mlp.gate_up(hidden)
            mlp.down(inner)
        model.head(hidden, runner._logits[:batch])

    return graph_ms(run)
