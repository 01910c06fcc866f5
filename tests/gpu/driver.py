"""Feeds a runner of either device with hand-made steps over shuffled blocks."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from tidemill_engine.attention.base import ForwardBatch
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.step import NewRequest, SampledRow, ScheduledRow, SchedulerOutput, SnapshotCopy

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


class Driver:
    """Rows, their blocks and tokens."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.pool.block_size
        self.free_blocks = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self._new: list[NewRequest] = []

    def add(
        self,
        row: int,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        blocks: Sequence[int] = (),
        computed: int = 0,
    ) -> None:
        """Enters a request; `blocks` hold the KV of its first `computed` tokens."""
        needed = -(-len(token_ids) // self.block_size) - len(blocks)
        self.blocks[row] = [*blocks, *(self.free_blocks.pop() for _ in range(needed))]
        self.computed[row], self.tokens[row] = computed, list(token_ids)
        self._new.append(
            NewRequest(
                row=row,
                token_ids=list(token_ids),
                prompt_tokens=len(token_ids),
                sampling=sampling,
                block_ids=list(self.blocks[row]),
                sequence_slot=row,
            )
        )

    def enter(self) -> None:
        """Lets the runner know of the requests, and computes nothing."""
        self.runner.execute(SchedulerOutput(step=0, new_requests=self._new))
        self._new = []

    def step(self, parts: dict[int, int], copies: Sequence[SnapshotCopy] = ()) -> dict[int, SampledRow]:
        """Computes so many tokens of each row, decode rows first; returns what was sampled."""
        rows = []
        for row, count in sorted(parts.items(), key=lambda item: item[1] != 1):
            start, end = self.computed[row], self.computed[row] + count
            added = [self.free_blocks.pop() for _ in range(-(-end // self.block_size) - len(self.blocks[row]))]
            self.blocks[row] += added
            rows.append(ScheduledRow(row, start, count, added, end == len(self.tokens[row])))
            self.computed[row] = end
        result = self.runner.execute(
            SchedulerOutput(step=1, new_requests=self._new, rows=rows, snapshot_copies=list(copies))
        )
        self._new = []
        for sampled in result.sampled:
            self.tokens[sampled.row] += sampled.token_ids
        return {sampled.row: sampled for sampled in result.sampled}

    def prefill(self, row: int, chunk: int = 1 << 20) -> None:
        """Computes all known tokens in chunks."""
        while self.computed[row] < len(self.tokens[row]):
            left = len(self.tokens[row]) - self.computed[row]
            if row in self.step({row: min(chunk, left)}):
                return

    def generate(self, rows: Sequence[int], num_tokens: int) -> list[list[int]]:
        """Decodes all rows together until each has so many output tokens; their prompts are computed."""
        starts = {row: self.computed[row] for row in rows}
        while any(len(self.tokens[row]) - starts[row] < num_tokens for row in rows):
            self.step(dict.fromkeys(rows, 1))
        return [self.tokens[row][starts[row] : starts[row] + num_tokens] for row in rows]


def prompt(length: int, seed: int, vocab: int = 264) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def all_logits(driver: Driver, token_ids: list[int], chunk: int = 1 << 20) -> torch.Tensor:
    """[tokens, vocab] of a prompt computed in chunks on the driver's device; uses row 0."""
    runner = driver.runner
    driver.add(0, token_ids)
    driver.enter()
    parts = []
    for start in range(0, len(token_ids), chunk):
        scheduled = [ScheduledRow(0, start, min(chunk, len(token_ids) - start), [], False)]
        parts.append(_device_logits(runner, scheduled) if hasattr(runner, "cuda_model") else _logits(runner, scheduled))
    return torch.cat(parts)


def _device_logits(runner: Any, scheduled: list[ScheduledRow]) -> torch.Tensor:
    from tidemill_engine.cuda.batch import read_rows

    runner.inputs.wait()
    runner.prepare(read_rows(scheduled, runner.rows))
    hidden = runner.forward(scheduled[0].num_tokens, None)
    return hidden.float() @ runner.cuda_model.head.weight.float().T


def _logits(runner: ModelRunner, scheduled: list[ScheduledRow]) -> torch.Tensor:
    batch, fresh = runner.rows.batch(scheduled, runner.pool.null_block)
    runner.pool.clear_blocks(torch.from_numpy(fresh))
    parts = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    # The reference runner's model makes its tensors on the runner's device.
    with getattr(runner, "device", torch.device("cpu")):
        batch = ForwardBatch(**(parts | {"sample_indices": torch.arange(scheduled[0].num_tokens)}))
        runner.attention.begin(batch)
        return runner.model.logits(runner.model.forward(batch, runner.attention))
