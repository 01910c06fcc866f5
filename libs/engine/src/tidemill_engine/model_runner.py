"""Runs steps on one rank: keeps each row's tokens and blocks, builds the batch, runs the model, samples."""

import time
from pathlib import Path

import numpy as np
import torch

from tidemill_engine.attention.base import Chunk, ForwardBatch
from tidemill_engine.kv_groups import KVGroupSpec, check_block_size, kv_format, num_model_heads
from tidemill_engine.kv_pool import KVPool, block_bytes
from tidemill_engine.loading.model import load_model
from tidemill_engine.models.base import ModelShape
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling.grammar import GrammarCompiler
from tidemill_engine.sampling.sampler import Sampled, Sampler
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, SampledRow, ScheduledRow, SchedulerOutput, StepResult


class ModelRunner:
    """Loads a rank's share of the model and its KV pool; `execute` is called with the same steps on all ranks."""

    pool_type = KVPool

    def __init__(self, settings: EngineSettings, tp: TensorParallel) -> None:
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)
        self.tp = tp
        shape = self._load(settings)
        self.groups = shape.groups
        check_block_size(self.groups, settings.block_size)
        self.kv_format = kv_format(self.groups, settings.block_size)
        self.vocab_size = shape.vocab_size
        self.context_tokens = min(settings.max_context_tokens or shape.context_tokens, shape.context_tokens)
        self.head_range = held_heads(self.groups, tp)
        bytes_per_block = block_bytes(self.groups, settings.block_size, tp.size)
        self.kv_bytes_per_token = bytes_per_block // settings.block_size
        self.num_blocks = settings.num_blocks or settings.kv_memory_bytes // bytes_per_block
        if self.num_blocks < 1:
            raise ValueError(f"kv_memory_bytes = {settings.kv_memory_bytes} holds no block of {bytes_per_block} bytes")
        has_state = any(spec.kind != "paged" for spec in self.groups)
        self.num_snapshots = settings.num_snapshots if has_state else 0
        self.pool = self.pool_type(
            self.groups,
            block_size=settings.block_size,
            num_blocks=self.num_blocks,
            num_slots=settings.max_num_seqs,
            num_snapshots=self.num_snapshots,
            head_range=self.head_range,
        )
        self._open_attention()
        self.rows = RowTables(settings.max_num_seqs, self.context_tokens, settings.block_size)
        self.sampler = Sampler(settings.max_num_seqs, self.vocab_size, settings.device)
        self.grammars = GrammarCompiler(Path(settings.model_dir), self.vocab_size)

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs one step; followers return the same tokens without log-probabilities."""
        started = time.perf_counter()
        self._enter(out)
        if not out.rows:
            return StepResult(step=out.step, sampled=[], forward_s=0.0, sample_s=0.0)
        for copy in out.snapshot_copies:
            if copy.restore:
                self.pool.restore_snapshot(copy.sequence_slot, copy.snapshot_id)
        batch, fresh = self.rows.batch(out.rows, self.pool.null_block)
        if fresh.size:
            self.pool.clear_blocks(torch.from_numpy(fresh))
        self.attention.begin(batch)
        hidden = self.model.forward(batch, self.attention)
        for copy in out.snapshot_copies:
            if not copy.restore:
                self.pool.save_snapshot(copy.sequence_slot, copy.snapshot_id)
        logits = self.model.logits(hidden) if hidden.shape[0] else hidden
        forwarded = time.perf_counter()
        sampled = self._sample(logits, [row.row for row in out.rows if row.sample])
        return StepResult(
            step=out.step,
            sampled=sampled,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def warm_up(self) -> None:
        """Runs a prefill and a decode step over block 0 and leaves no trace of them."""
        tokens = [0] * min(8, self.pool.block_size, self.context_tokens - 1)
        request = NewRequest(
            row=0,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            sampling=SamplingParams(temperature=0.0),
            block_ids=[0],
            sequence_slot=0,
        )
        last = len(tokens) - 1
        self.execute(SchedulerOutput(step=0, new_requests=[request], rows=[ScheduledRow(0, 0, last, [], False)]))
        self.execute(SchedulerOutput(step=0, rows=[ScheduledRow(0, last, 1, [], True)]))
        self.execute(SchedulerOutput(step=0, freed_rows=[0]))
        self.pool.reset_slot(0)

    def _load(self, settings: EngineSettings) -> ModelShape:
        form = settings.weights, settings.kv_dtype
        loaded = load_model(Path(settings.model_dir), *form, self.tp, index_dtype=settings.index_dtype)
        self.model = loaded.model
        self.backend = loaded.backend
        self._make_attention = loaded.make_attention
        return loaded.model

    def _open_attention(self) -> None:
        self.attention = self._make_attention(self.pool)

    def _enter(self, out: SchedulerOutput) -> None:
        for row in out.freed_rows:
            self.sampler.free(row)
        for request in out.new_requests:
            self.rows.enter(request)
            if request.sequence_slot >= 0 and request.reset_sequence_state:
                self.pool.reset_slot(request.sequence_slot)
            if self.tp.is_leader:
                self._start_sampling(request)

    def _start_sampling(self, request: NewRequest) -> None:
        tokens = self.rows.token_ids[request.row, : len(request.token_ids)].astype(np.int64)
        self.sampler.start(request.row, request.sampling, tokens, request.prompt_tokens)
        if request.sampling.grammar is not None:
            constraint = self.grammars.start(request.sampling.grammar, request.grammar_consumed_token_ids)
            self.sampler.constrain(request.row, constraint)

    def _sample(self, logits: torch.Tensor, sampling: list[int]) -> list[SampledRow]:
        if not sampling:
            return []
        rows = np.array(sampling, np.int64)
        done: Sampled | None = None
        token_ids = torch.zeros(rows.size, dtype=torch.int64)
        if self.tp.is_leader:
            done = self.sampler.sample(logits, rows, self.rows.num_outputs(rows))
            token_ids = torch.from_numpy(done.token_ids)
        ids = self.tp.broadcast_from_leader(token_ids).numpy()
        self.rows.append(rows, ids)
        return sampled_rows(sampling, ids.tolist(), done)


def held_heads(groups: tuple[KVGroupSpec, ...], tp: TensorParallel) -> tuple[int, int]:
    """This rank's range of the model's KV heads: all of them where no group is split."""
    heads = num_model_heads(groups)
    return tp.share("KV heads", heads) if any(spec.sharded for spec in groups) else (0, heads)


def sampled_rows(rows: list[int], token_ids: list[int], done: Sampled | None) -> list[SampledRow]:
    """One token for each row, with what the full sampler says of it."""
    result = [SampledRow(row, [token]) for row, token in zip(rows, token_ids, strict=True)]
    for i, entry in (done.logprobs if done else {}).items():
        result[i].logprobs = [entry]
    for i, error in (done.errors if done else {}).items():
        result[i].token_ids, result[i].grammar_error = [], error
    return result


class RowTables:
    """Tokens and block tables of all rows."""

    def __init__(self, num_rows: int, context_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((num_rows, context_tokens + 1), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.prompt_tokens = np.zeros(num_rows, np.int64)
        self.blocks = np.zeros((num_rows, -(-(context_tokens + 1) // block_size)), np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.slots = np.full(num_rows, -1, np.int64)

    def enter(self, request: NewRequest) -> None:
        """A request takes a row."""
        row, tokens = request.row, len(request.token_ids)
        self.token_ids[row, :tokens] = request.token_ids
        self.num_tokens[row] = tokens
        self.prompt_tokens[row] = request.prompt_tokens
        self.num_blocks[row] = 0
        self.slots[row] = request.sequence_slot
        self.extend(row, request.block_ids)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each row."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def num_outputs(self, rows: np.ndarray) -> np.ndarray:
        """Output tokens so far."""
        counts: np.ndarray = self.num_tokens[rows] - self.prompt_tokens[rows]
        return counts

    def batch(self, scheduled: list[ScheduledRow], null_block: int) -> tuple[ForwardBatch, np.ndarray]:
        """The step's tokens, and the blocks that it writes from their beginning."""
        for part in scheduled:
            self.extend(part.row, part.new_block_ids)
        rows = np.array([part.row for part in scheduled])
        starts = np.array([part.start for part in scheduled])
        counts = np.array([part.num_tokens for part in scheduled])
        firsts = np.cumsum(counts) - counts
        token_rows = np.repeat(rows, counts)
        positions = np.arange(counts.sum()) + np.repeat(starts - firsts, counts)
        block_ids = self.blocks[token_rows, positions // self.block_size]
        offsets = positions % self.block_size
        num_decode = int(np.argmax(counts != 1)) if (counts != 1).any() else len(scheduled)
        decoding, lengths = rows[:num_decode], starts[:num_decode] + 1
        samples = np.array([part.sample for part in scheduled])
        batch = ForwardBatch(
            token_ids=torch.from_numpy(self.token_ids[token_rows, positions]),
            positions=torch.from_numpy(positions),
            block_ids=torch.from_numpy(block_ids),
            block_offsets=torch.from_numpy(offsets),
            num_decode=num_decode,
            decode_blocks=torch.from_numpy(self._decode_blocks(decoding, lengths, null_block)),
            decode_lengths=torch.from_numpy(lengths),
            decode_slots=torch.from_numpy(self.slots[decoding]),
            chunks=tuple(
                self._chunk(part, int(first))
                for part, first in zip(scheduled[num_decode:], firsts[num_decode:], strict=True)
            ),
            sample_indices=torch.from_numpy((firsts + counts - 1)[samples]),
        )
        return batch, block_ids[offsets == 0]

    def _decode_blocks(self, rows: np.ndarray, lengths: np.ndarray, null_block: int) -> np.ndarray:
        counts = -(-lengths // self.block_size)
        width = int(counts.max(initial=0))
        table: np.ndarray = np.where(np.arange(width) < counts[:, None], self.blocks[rows, :width], null_block)
        return table

    def _chunk(self, part: ScheduledRow, first: int) -> Chunk:
        used = -(-(part.start + part.num_tokens) // self.block_size)
        blocks = torch.from_numpy(self.blocks[part.row, :used].copy())
        return Chunk(first, part.num_tokens, part.start, blocks, int(self.slots[part.row]))

    def extend(self, row: int, block_ids: list[int]) -> None:
        """Appends to the row's block table."""
        if block_ids:
            held = self.num_blocks[row]
            self.blocks[row, held : held + len(block_ids)] = block_ids
            self.num_blocks[row] = held + len(block_ids)
