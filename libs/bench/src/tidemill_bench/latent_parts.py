"""Where the device's time in a step of a latent model with an indexer goes.

Kernels start before those in front of them end, so that their own times do not add up: a part is what the step takes
less without it. What stands in for a part has its shapes and costs next to nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from tidemill_engine.cuda import latent_attention
from tidemill_engine.cuda.attention import PageTable
from tidemill_engine.cuda.batch import StepRows
from tidemill_engine.cuda.experts import DeviceExperts, DeviceMoe, DeviceRouter
from tidemill_engine.cuda.kernels.row_choice import choose_rows
from tidemill_engine.cuda.latent_attention import LatentPagedAttention
from tidemill_engine.cuda.latent_model import CudaLatentModel
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.cuda.timing import graph_ms


@dataclass(frozen=True)
class LatentParts:
    """Milliseconds of one step."""

    whole: float
    attention: float
    """Queries into latent space, attention, values out of it."""
    scores: float
    choice: float
    experts: float
    """Routed ones: dispatch and products."""
    routing: float
    met: float
    """Share of a layer's experts that were chosen."""

    @property
    def rest(self) -> float:
        """Dense products, shared experts, norms, rotation, logits and draw."""
        return self.whole - self.attention - self.scores - self.choice - self.experts - self.routing


@torch.inference_mode()
def decode_parts(runner: CudaModelRunner, batch: int, context: int) -> LatentParts:
    """A decode step of `batch` different tokens with contexts of `context` tokens in shuffled blocks."""
    runner._bind_graph(batch)
    size = runner.pool.block_size
    per_row = -(-context // size)
    blocks = np.random.default_rng(0).permutation(runner.num_blocks)[: batch * per_row].astype(np.int32)
    last = np.full(batch, (context - 1) % size + 1, np.int32)
    table = PageTable(np.arange(batch + 1, dtype=np.int32) * per_row, blocks, last, np.full(batch, -1, np.int32))
    runner.inputs.wait()
    host = runner.inputs.host
    host["token_ids"][:batch] = np.random.default_rng(1).integers(1000, runner.vocab_size, batch)
    host["positions"][:batch] = context - 1
    runner._send(table, np.ones(batch, np.int64), batch)
    runner.inputs.mark_sent()
    runner.paged.expect_decode(batch)
    return _parts(runner, lambda: graph_ms(lambda: runner._record_decode(batch)))


@torch.inference_mode()
def chunk_parts(runner: CudaModelRunner, start: int, count: int) -> LatentParts:
    """A chunk of `count` tokens after `start` cached ones."""
    rows, size = runner.rows, runner.pool.block_size
    used = -(-(start + count) // size)
    rows.token_ids[0, : start + count] = np.random.default_rng(2).integers(1000, runner.vocab_size, start + count)
    rows.num_tokens[0] = rows.prompt_tokens[0] = start + count
    rows.blocks[0, :used] = np.random.default_rng(3).permutation(runner.num_blocks)[:used]
    step = StepRows(np.array([0]), np.array([start]), np.array([count]), np.array([True]), 0)
    runner.inputs.wait()
    runner.prepare(step)

    def run() -> None:
        runner._head(runner.forward(count, runner.inputs.device["wanted"][:1]))

    return _parts(runner, lambda: launched_ms(run))


def launched_ms(run: Callable[[], object], rounds: int = 4, warm_ups: int = 1) -> float:
    """Median time between events around launches that the host starts one by one."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(median(times[warm_ups:]))


def _parts(runner: CudaModelRunner, measure: Callable[[], float]) -> LatentParts:
    attention, model = runner.paged, runner.cuda_model
    assert isinstance(attention, LatentPagedAttention)
    assert isinstance(model, CudaLatentModel)
    moe = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, DeviceMoe))
    heads, values = model.layers[0].expansion.values.shape[:2]
    kept: dict[Any, Any] = {}

    def once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def attend(layer: int, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return once((len(q),), lambda: torch.randn(len(q), heads * values, device="cuda", dtype=torch.bfloat16))  # type: ignore[no-any-return]

    def choose(scores: torch.Tensor, visible: torch.Tensor, *more: Any) -> torch.Tensor:
        return once(("slots", tuple(scores.shape)), lambda: choose_rows(scores, visible, *more))  # type: ignore[no-any-return]

    def route(router: DeviceRouter, x: torch.Tensor, ids: torch.Tensor | None) -> Any:
        return once((id(router),), lambda: latent_router(router, x, ids))

    latent_router = DeviceRouter.__call__
    whole = measure()
    without = {}
    # All other parts are compared at the same routes: what stands in for a part sends tokens to other experts.
    with _replaced(DeviceRouter, "__call__", route):
        routed = measure()
        for name, owner, attribute, stand_in in (
            ("attention", attention, "run", attend),
            ("scores", latent_attention, "score_rows", lambda *_, **__: None),
            ("choice", latent_attention, "choose_rows", choose),
            ("experts", DeviceExperts, "__call__", lambda experts, x, weights, chosen: x),
        ):
            with _replaced(owner, attribute, stand_in):
                without[name] = routed - measure()
    routes = [kept[id(layer.mlp.router),][1] for layer in model.layers if isinstance(layer.mlp, DeviceMoe)]
    num_experts = moe.experts.down.values.shape[0]
    met = sum(int(chosen.unique().numel()) for chosen in routes) / len(routes) / num_experts
    return LatentParts(whole, routing=whole - routed, met=met, **without)


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)
