"""Tiny checkpoints and a plain driver that feeds a ModelRunner without a scheduler."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from harness.oracle_checkpoints import make_oracle

from tidemill_engine.attention.base import ForwardBatch
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import NewRequest, SampledRow, ScheduledRow, SchedulerOutput, SnapshotCopy

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


class Driver:
    """Gives requests shuffled blocks and runs the steps a test asks for."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.pool.block_size
        self.free_blocks = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self._new: list[NewRequest] = []
        self._freed: list[int] = []

    def add(
        self,
        row: int,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        prompt_tokens: int | None = None,
        blocks: Sequence[int] = (),
        computed: int = 0,
        **fields: Any,
    ) -> None:
        """Enters a request; `blocks` hold the KV of its first `computed` tokens."""
        needed = -(-len(token_ids) // self.block_size) - len(blocks)
        self.blocks[row] = [*blocks, *(self.free_blocks.pop() for _ in range(needed))]
        self.computed[row], self.tokens[row] = computed, list(token_ids)
        self._new.append(
            NewRequest(
                row=row,
                token_ids=list(token_ids),
                prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
                sampling=sampling,
                block_ids=list(self.blocks[row]),
                **({"sequence_slot": row} | fields),
            )
        )

    def free(self, row: int) -> None:
        """Ends a request; its blocks may be given again."""
        self._freed.append(row)
        self.free_blocks.extend(self.blocks.pop(row))

    def step(self, parts: dict[int, int], copies: Sequence[SnapshotCopy] = ()) -> dict[int, SampledRow]:
        """Computes so many tokens of each row, decode rows first; returns what was sampled."""
        rows = []
        for row, count in sorted(parts.items(), key=lambda item: item[1] != 1):
            start, end = self.computed[row], self.computed[row] + count
            grown = -(-end // self.block_size) - len(self.blocks[row])
            added = [self.free_blocks.pop() for _ in range(grown)]
            self.blocks[row] += added
            rows.append(ScheduledRow(row, start, count, added, end == len(self.tokens[row])))
            self.computed[row] = end
        out = SchedulerOutput(
            step=1, new_requests=self._new, rows=rows, freed_rows=self._freed, snapshot_copies=list(copies)
        )
        self._new, self._freed = [], []
        result = self.runner.execute(msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=SchedulerOutput))
        for sampled in result.sampled:
            self.tokens[sampled.row] += sampled.token_ids
        return {sampled.row: sampled for sampled in result.sampled}

    def prefill(self, row: int, chunk: int = 1 << 20) -> SampledRow:
        """Computes all known tokens in chunks; returns the sampled token."""
        while True:
            left = len(self.tokens[row]) - self.computed[row]
            sampled = self.step({row: min(chunk, left)})
            if row in sampled:
                return sampled[row]

    def generate(self, row: int, num_tokens: int, chunk: int = 1 << 20) -> list[int]:
        """The first sampled tokens of a request that was added."""
        self.prefill(row, chunk)
        for _ in range(num_tokens - 1):
            self.step({row: 1})
        return self.tokens[row][-num_tokens:]

    @torch.inference_mode()
    def all_logits(self, token_ids: Sequence[int], chunk: int = 1 << 20, poison: bool = False) -> torch.Tensor:
        """[tokens, vocab] logits of every position, computed in chunks; uses row 0 and leaves it free."""
        self.add(0, token_ids)
        self.runner.execute(SchedulerOutput(step=0, new_requests=self._new, freed_rows=self._freed))
        self._new, self._freed = [], []
        if poison:
            poison_blocks(self.runner, self.free_blocks + self.blocks[0])
        parts = []
        for start in range(0, len(token_ids), chunk):
            count = min(chunk, len(token_ids) - start)
            scheduled = [ScheduledRow(0, start, count, [], False)]
            batch, fresh = self.runner.rows.batch(scheduled, self.runner.pool.null_block)
            parts.append(self._forward(batch, fresh))
        self.free(0)
        return torch.cat(parts)

    def _forward(self, batch: ForwardBatch, fresh: np.ndarray) -> torch.Tensor:
        runner = self.runner
        runner.pool.clear_blocks(torch.from_numpy(fresh))
        batch = dataclasses.replace(batch, sample_indices=torch.arange(batch.token_ids.shape[0]))
        runner.attention.begin(batch)
        return runner.model.logits(runner.model.forward(batch, runner.attention))


def poison_blocks(runner: ModelRunner, block_ids: Sequence[int]) -> None:
    """Fills blocks with NaN: nothing may read what no one wrote."""
    for spec in runner.groups:
        if spec.kind == "paged":
            runner.pool.slabs[spec.name][list(block_ids)] = float("nan")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint once: tiny("llama", rope_scaling={...})."""
    made: dict[str, Path] = {}

    def make(architecture: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((architecture, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = make_tiny(architecture, tmp_path_factory.mktemp("tiny") / architecture, seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Has transformers make a tiny checkpoint once: oracle("qwen3_moe", num_experts=4)."""
    made: dict[str, Path] = {}

    def make(name: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((name, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = make_oracle(name, tmp_path_factory.mktemp("oracle") / name, seed, **overrides)
        return made[key]

    return make


@pytest.fixture
def start_runner() -> Callable[..., Driver]:
    """Loads a checkpoint behind a driver: start_runner(model_dir, block_size=8, ...)."""

    def start(model_dir: Path, **settings: Any) -> Driver:
        defaults: dict[str, Any] = {"block_size": 8, "num_blocks": 96, "num_snapshots": 16, "max_num_seqs": 8}
        return Driver(ModelRunner(EngineSettings(model_dir=str(model_dir), **(defaults | settings)), TensorParallel()))

    return start


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
