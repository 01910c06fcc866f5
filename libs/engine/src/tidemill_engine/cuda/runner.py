"""Runs steps on one CUDA device: one copy to it and one from it for each step; decode steps replay a graph."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch

from tidemill_engine.cuda.attention import PageTable, StepAttention
from tidemill_engine.cuda.batch import StepRows, fill_tokens, page_table, read_rows
from tidemill_engine.cuda.graphs import DecodeGraphs
from tidemill_engine.cuda.kernels.draw import draw_tokens
from tidemill_engine.cuda.kernels.embed import embed
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.loading import load_cuda_model
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.cuda.tuning import tune
from tidemill_engine.loading.checkpoint import TensorSource
from tidemill_engine.model_runner import ModelRunner, sampled_rows
from tidemill_engine.models.base import ModelShape
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling.sampler import Sampled
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SchedulerOutput, StepResult

log = structlog.get_logger()

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class StartedStep:
    """A step whose kernels are queued; its tokens arrive in `tokens` (pinned) at `arrived`, or are known already."""

    step: int
    rows: np.ndarray
    """The runner's rows that sample, in order."""
    places: np.ndarray
    """Where in `tokens` each row's token is."""
    tokens: torch.Tensor
    arrived: torch.cuda.Event
    sampled: Sampled | None
    """From the full sampler, which has waited for the device."""
    may_run_ahead: bool
    begin_s: float


def _arrival(num_rows: int) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Where a step's tokens land on the host, and when."""
    tokens = torch.zeros(num_rows, dtype=torch.int32, pin_memory=True)
    return tokens, torch.cuda.Event()  # type: ignore[no-untyped-call]


class CudaModelRunner(ModelRunner):
    """Same steps and tables as the CPU runner; `tensors` replaces the checkpoint of the model folder."""

    pool_type = CudaKVPool

    def __init__(
        self,
        settings: EngineSettings,
        tp: TensorParallel,
        tensors: TensorSource | None = None,
        *,
        use_graphs: bool = True,
        prefill_backend: str = "fa3",
    ) -> None:
        torch.cuda.set_device(torch.device(settings.device).index or 0)
        self._tensors = tensors
        super().__init__(settings, tp)
        assert isinstance(self.pool, CudaKVPool)
        self._invariant = settings.batch_invariant
        self.paged: StepAttention = self.cuda_model.open_attention(self.pool, prefill_backend)
        self._max_rows = settings.max_num_seqs
        num_indices = self._max_rows * (self.rows.blocks.shape[1] + 1)
        num_tokens = max(settings.max_num_batched_tokens, self._max_rows)
        more = self.paged.part_sizes(self._max_rows, num_tokens)
        tile_words = self.paged.most_tile_words(self._max_rows, num_indices)
        self.inputs = StepInputs(num_tokens, self._max_rows, num_indices, tile_words, more)
        self.paged.open(self.inputs)
        self._logits = torch.empty((self._max_rows, self.vocab_size), dtype=torch.float32, device="cuda")
        self._tokens = torch.zeros(self._max_rows, dtype=torch.int32, device="cuda")
        # By the runner's row; the last one is for the rows that fill a graph up.
        self._row_tokens = torch.zeros(self._max_rows + 1, dtype=torch.int32, device="cuda")
        self._arrivals = [_arrival(self._max_rows), _arrival(self._max_rows)]
        graphs = DecodeGraphs(self._max_rows, self._bind_graph, self._record_decode)
        self.graphs = graphs if use_graphs else None
        self.replay: Callable[[torch.cuda.CUDAGraph], None] = torch.cuda.CUDAGraph.replay
        """How a graph is launched; a benchmark puts its events around it."""

    def _load(self, settings: EngineSettings) -> ModelShape:
        self.cuda_model = load_cuda_model(Path(settings.model_dir), settings, self.tp, self._tensors)
        form = "bf16" if settings.weights == "auto" else settings.weights
        self.backend = f"cuda/{form}" + ("/batch-invariant" if settings.batch_invariant else "")
        return self.cuda_model

    def _open_attention(self) -> None:
        """Attention follows once the pool and the buffers are there."""

    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs one step and waits for its tokens."""
        return self.finish(self.begin(out))

    @torch.inference_mode()
    def begin(self, out: SchedulerOutput) -> StartedStep:
        """Queues a step; at most one may be unfinished before it, and that one must allow it."""
        started = time.perf_counter()
        self._enter(out)
        if not out.rows:
            return self._started(out.step, _NO_ROWS, _NO_ROWS, None, False, started)
        step = read_rows(out.rows, self.rows)
        self.inputs.wait()
        for copy in out.snapshot_copies:
            if copy.restore:
                self.pool.restore_snapshot(copy.sequence_slot, copy.snapshot_id)
        places = self._run_graph(step) if self.graphs is not None and step.all_decode else self._run_eager(step)
        for copy in out.snapshot_copies:
            if not copy.restore:
                self.pool.save_snapshot(copy.sequence_slot, copy.snapshot_id)
        rows = step.rows[step.samples]
        positions = self._positions(step)[step.samples]
        if self.sampler.is_plain(rows, positions):
            return self._started(out.step, rows, places, None, step.all_decode, started)
        done = self.sampler.sample(self._logits[torch.from_numpy(places).cuda()], rows, positions)
        return self._started(out.step, rows, places, done, False, started)

    @torch.inference_mode()
    def finish(self, started: StartedStep) -> StepResult:
        """Waits for a step's tokens; steps finish in the order in which they began."""
        waited = time.perf_counter()
        rows, done = started.rows, started.sampled
        if done is not None:
            ids = done.token_ids
        else:
            started.arrived.synchronize()
            ids = started.tokens.numpy()[started.places].astype(np.int64)
        self.rows.append(rows, ids)
        return StepResult(
            step=started.step,
            sampled=sampled_rows(rows.tolist(), ids.tolist(), done),
            forward_s=started.begin_s,
            sample_s=time.perf_counter() - waited,
        )

    def warm_up(self) -> None:
        """Measures which products are fastest, captures all graphs, runs a prefill and a decode step over block 0."""
        started = time.perf_counter()
        if self.graphs is not None:
            with torch.inference_mode():
                if not self._invariant:
                    tune(self.cuda_model, self.graphs.sizes)
                self.graphs.capture_all()
        captured = time.perf_counter()
        super().warm_up()
        torch.cuda.synchronize()
        log.info(
            "cuda_ready",
            decode_s=round(captured - started, 2),
            prefill_s=round(time.perf_counter() - captured, 2),
            graphs=len(self.graphs.sizes) if self.graphs is not None else 0,
        )

    def _run_graph(self, step: StepRows) -> np.ndarray:
        """Replays the step's graph; returns the sampled rows' places in its output."""
        assert self.graphs is not None
        size = self.graphs.size_for(step.rows.size)
        graph = self.graphs.get(size)
        table = page_table(self.rows, step.rows, step.starts + 1, size, self.pool.null_block)
        self._fill(step, size)
        self._send(table, np.ones(size, np.int64), size)
        self.inputs.mark_sent()
        self.replay(graph)
        return np.flatnonzero(step.samples)

    def _run_eager(self, step: StepRows) -> np.ndarray:
        """Runs the step launch by launch; the output holds the sampled rows only."""
        self.prepare(step)
        num_sampled = int(step.samples.sum())
        hidden = self.forward(step.num_tokens, self.inputs.device["wanted"][:num_sampled])
        if num_sampled:
            self._head(hidden)
        return np.arange(num_sampled)

    def prepare(self, step: StepRows) -> None:
        """Sends the step's numbers and plans its attention for a pass without a graph."""
        table = page_table(self.rows, step.rows, step.starts + step.counts, 0, self.pool.null_block)
        self._fill(step, 0)
        self._send(table, step.counts, step.num_decode)
        self.paged.plan(table, step.counts, fresh=not step.starts[step.num_decode :].any())
        self.inputs.mark_sent()

    def forward(self, num_tokens: int, wanted: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of the wanted tokens (None: all) of the step that was prepared."""
        device = self.inputs.device
        hidden, token_ids = embed(
            device["token_ids"][:num_tokens], device["rows"], self._row_tokens, self.cuda_model.embedding
        )
        return self.cuda_model.forward(
            hidden,
            token_ids,
            device["positions"][:num_tokens],
            device["block_ids"][:num_tokens],
            self.paged,
            wanted,
        )

    def _fill(self, step: StepRows, padded: int) -> None:
        """Numbers of tokens and of sampled rows; `padded` > 0 is a graph's size, which samples every row."""
        host = self.inputs.host
        fill_tokens(host, self.rows, step)
        if padded:
            rows = step.rows
            host["token_ids"][rows.size : padded] = 0
            host["positions"][rows.size : padded] = 0
            host["block_ids"][rows.size : padded] = self.pool.null_block
            host["temperatures"][rows.size : padded] = 0
            host["rows"][rows.size : padded] = self._max_rows
            positions = self._positions(step)
        else:
            rows = step.rows[step.samples]
            positions = self._positions(step)[step.samples]
            host["wanted"][: rows.size] = (np.cumsum(step.counts) - 1)[step.samples]
        params = self.sampler.params
        host["temperatures"][: rows.size] = params.temperature[rows]
        host["seeds"][: rows.size] = params.seed[rows].view(np.int64)
        host["counts"][: rows.size] = positions
        host["rows"][: rows.size] = rows

    def _send(self, table: PageTable, counts: np.ndarray, num_decode: int) -> None:
        tile_words = self.paged.fill(self.inputs.host, table, counts, num_decode)
        self.inputs.send(table.indices.size, tile_words)

    def _head(self, hidden: torch.Tensor) -> None:
        """Logits and plainly sampled tokens of the rows, into the static buffers."""
        size, device = hidden.shape[0], self.inputs.device
        logits = self._logits[:size]
        self.cuda_model.head(hidden, logits)
        draw_tokens(
            logits,
            device["temperatures"][:size],
            device["seeds"][:size],
            device["counts"][:size],
            device["rows"][:size],
            self._tokens,
            self._row_tokens,
        )

    def _started(
        self, step: int, rows: np.ndarray, places: np.ndarray, done: Sampled | None, may_run_ahead: bool, begun: float
    ) -> StartedStep:
        """Starts the copy of the drawn tokens to the host."""
        tokens, arrived = self._arrivals[0]
        self._arrivals.reverse()
        if rows.size and done is None:
            end = int(places[-1]) + 1
            tokens[:end].copy_(self._tokens[:end], non_blocking=True)
            arrived.record()
        return StartedStep(step, rows, places, tokens, arrived, done, may_run_ahead, time.perf_counter() - begun)

    def _positions(self, step: StepRows) -> np.ndarray:
        """Output tokens of each row before the one that this step samples."""
        positions: np.ndarray = step.starts + step.counts - self.rows.prompt_tokens[step.rows]
        return positions

    def _bind_graph(self, size: int) -> None:
        """Sends rows that fill a graph up and nothing else, so that the recorded run reads sound numbers."""
        self.inputs.wait()
        host, null = self.inputs.host, self.pool.null_block
        values = {"token_ids": 0, "positions": 0, "block_ids": null, "temperatures": 1, "counts": 0}
        for name, value in (values | {"rows": self._max_rows}).items():
            host[name][:size] = value
        nobody = np.zeros(0, np.int64)
        self._send(page_table(self.rows, nobody, nobody, size, null), np.ones(size, np.int64), size)
        self.inputs.mark_sent()
        self.paged.expect_decode(size)

    def _record_decode(self, size: int) -> None:
        self._head(self.forward(size, None))
