"""Runs steps on one CUDA device: one copy to it and one from it for each step; decode steps replay a graph."""

import time
from pathlib import Path

import numpy as np
import structlog
import torch

from tidemill_engine.cuda.attention import PagedAttention, PageTable
from tidemill_engine.cuda.batch import StepRows, fill_tokens, page_table, read_rows
from tidemill_engine.cuda.graphs import DecodeGraphs, padding_table
from tidemill_engine.cuda.kernels.draw import draw_tokens
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.linear import float_logits
from tidemill_engine.cuda.loading import load_cuda_model
from tidemill_engine.cuda.requirements import require_machine
from tidemill_engine.cuda.step_inputs import StepInputs
from tidemill_engine.loading.checkpoint import TensorSource
from tidemill_engine.model_runner import ModelRunner, sampled_rows
from tidemill_engine.models.base import ModelShape
from tidemill_engine.models.dense import PAGED
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling.sampler import Sampled
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SampledRow, SchedulerOutput, StepResult

log = structlog.get_logger()


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
        require_machine()
        torch.cuda.set_device(torch.device(settings.device).index or 0)
        self._tensors = tensors
        super().__init__(settings, tp)
        assert isinstance(self.pool, CudaKVPool)
        heads = self.cuda_model.heads
        self.paged = PagedAttention(self.pool, PAGED, heads, prefill_backend=prefill_backend)
        self._max_rows = settings.max_num_seqs
        num_indices = self._max_rows * (self.rows.blocks.shape[1] + 1)
        num_tokens = max(settings.max_num_batched_tokens, self._max_rows)
        self.inputs = StepInputs(num_tokens, self._max_rows, num_indices)
        self._logits = torch.empty((self._max_rows, self.vocab_size), dtype=torch.float32, device="cuda")
        self._tokens = torch.zeros(self._max_rows, dtype=torch.int32, device="cuda")
        self._tokens_on_host = torch.zeros(self._max_rows, dtype=torch.int32, pin_memory=True)
        self._arrived = torch.cuda.Event()
        graphs = DecodeGraphs(self._max_rows, self._graph_wrapper, self._bind_graph, self._record_decode)
        self.graphs = graphs if use_graphs else None

    def _load(self, settings: EngineSettings) -> ModelShape:
        self.cuda_model = load_cuda_model(Path(settings.model_dir), settings, self.tp, self._tensors)
        self.backend = "cuda/flashinfer/bf16"
        return self.cuda_model

    def _open_attention(self) -> None:
        """Attention follows once the pool and the buffers are there."""

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs one step and waits for its tokens."""
        started = time.perf_counter()
        self._enter(out)
        if not out.rows:
            return StepResult(step=out.step, sampled=[], forward_s=0.0, sample_s=0.0)
        step = read_rows(out.rows, self.rows)
        self.inputs.wait()
        places = self._run_graph(step) if self.graphs is not None and step.all_decode else self._run_eager(step)
        forwarded = time.perf_counter()
        sampled = self._collect(step.rows[step.samples], places)
        return StepResult(
            step=out.step,
            sampled=sampled,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def warm_up(self) -> None:
        """Captures all graphs, which builds the decode kernels, then runs a prefill and a decode step over block 0."""
        started = time.perf_counter()
        if self.graphs is not None:
            with torch.inference_mode():
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
        self._send(table)
        self.paged.plan_replay(graph.wrapper, table)
        self.inputs.mark_sent()
        graph.graph.replay()
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
        decode, ends, null = step.num_decode, step.starts + step.counts, self.pool.null_block
        self._fill(step, 0)
        self._send(None)
        chunk_rows, chunk_ends = step.rows[decode:], ends[decode:]
        self.paged.plan(
            page_table(self.rows, step.rows[:decode], ends[:decode], 0, null) if decode else None,
            page_table(self.rows, chunk_rows, chunk_ends, 0, null) if chunk_rows.size else None,
            np.concatenate([[0], np.cumsum(step.counts[decode:])]).astype(np.int32),
        )
        self.inputs.mark_sent()

    def forward(self, num_tokens: int, wanted: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of the wanted tokens (None: all) of the step that was prepared."""
        device = self.inputs.device
        return self.cuda_model.forward(
            device["token_ids"][:num_tokens],
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
        else:
            rows = step.rows[step.samples]
            host["wanted"][: rows.size] = (np.cumsum(step.counts) - 1)[step.samples]
        params = self.sampler.params
        host["temperatures"][: rows.size] = params.temperature[rows]
        host["seeds"][: rows.size] = params.seed[rows].view(np.int64)
        host["counts"][: rows.size] = self.rows.num_outputs(rows)

    def _send(self, table: PageTable | None) -> None:
        if table is None:
            self.inputs.send(0)
            return
        host = self.inputs.host
        host["indptr"][: table.indptr.size] = table.indptr
        host["last_page_len"][: table.last_page_len.size] = table.last_page_len
        host["indices"][: table.indices.size] = table.indices
        self.inputs.send(table.indices.size)

    def _head(self, hidden: torch.Tensor) -> None:
        """Logits and plainly sampled tokens of the rows, into the static buffers."""
        size, device = hidden.shape[0], self.inputs.device
        logits = float_logits(hidden, self.cuda_model.head_weight, self._logits[:size])
        draw_tokens(
            logits, device["temperatures"][:size], device["seeds"][:size], device["counts"][:size], self._tokens
        )

    def _collect(self, rows: np.ndarray, places: np.ndarray) -> list[SampledRow]:
        """Brings the tokens to the host; rows that ask for more than temperature go through the full sampler."""
        if not rows.size:
            return []
        done: Sampled | None = None
        positions = self.rows.num_outputs(rows)
        if self.sampler.is_plain(rows, positions):
            end = int(places[-1]) + 1
            self._tokens_on_host[:end].copy_(self._tokens[:end], non_blocking=True)
            self._arrived.record()
            self._arrived.synchronize()
            ids = self._tokens_on_host.numpy()[places].astype(np.int64)
        else:
            done = self.sampler.sample(self._logits[torch.from_numpy(places).cuda()], rows, positions)
            ids = done.token_ids
        self.rows.append(rows, ids)
        return sampled_rows(rows.tolist(), ids.tolist(), done)

    def _graph_wrapper(self, size: int) -> object:
        device = self.inputs.device
        return self.paged.graph_wrapper(device["indptr"][: size + 1], device["indices"], device["last_page_len"][:size])

    def _bind_graph(self, wrapper: object, size: int) -> None:
        """Plans padding rows only and sends them, so that the recorded run reads sound numbers."""
        self.inputs.wait()
        host, null = self.inputs.host, self.pool.null_block
        for name, value in (
            ("token_ids", 0),
            ("positions", 0),
            ("block_ids", null),
            ("temperatures", 1),
            ("counts", 0),
        ):
            host[name][:size] = value
        table = padding_table(size, null)
        self._send(table)
        self.paged.plan_first(wrapper, table)
        self.inputs.mark_sent()

    def _record_decode(self, size: int) -> None:
        self._head(self.forward(size, None))
