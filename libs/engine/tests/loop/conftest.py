"""A driver for engines, tiny checkpoints, and an emulated runner.

The emulated runner computes no model, but keeps KV in blocks as a real one does and checks each read.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill_engine.engine import Engine
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.messages import (
    BlocksPinned,
    KVWanted,
    MoveWanted,
    OnboardWanted,
    Output,
    PrefillProgress,
    Report,
    RequestKey,
    StateExported,
    Stays,
    StepReport,
    Submit,
    Suspended,
)
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SampledRow, SchedulerOutput, StepResult

VOCAB = 1000


def emulated_next_token(token_ids: list[int]) -> int:
    """The emulated model: the next token is a hash of all tokens before."""
    raw = np.asarray(token_ids, np.uint32).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=4).digest(), "little") % VOCAB


@dataclass
class EmulatedRow:
    token_ids: list[int]
    block_ids: list[int]
    slot: int


@dataclass
class EmulatedRunner:
    """KV of a token is the token itself; sequence state is the tuple of all tokens so far."""

    settings: EngineSettings
    groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    num_snapshots: int = 0
    context_tokens: int = 4096
    vocab_size: int = VOCAB
    step_tokens: int = 1
    rows: dict[int, EmulatedRow] = field(default_factory=dict)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    snapshots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    computed_tokens: int = 0
    steps: list[SchedulerOutput] = field(default_factory=list)
    on_step: Callable[[], None] = lambda: None

    def execute(self, out: SchedulerOutput) -> StepResult:
        self.on_step()
        self.steps.append(out)
        assert out.rows, "an empty step was scheduled"
        assert sum(row.num_tokens for row in out.rows) <= self.settings.max_num_batched_tokens, "over the token budget"
        assert len({row.row for row in out.rows}) == len(out.rows) <= self.settings.max_num_seqs
        counts = [row.num_tokens > 1 for row in out.rows]
        assert counts == sorted(counts), "decode rows come first"
        for row in out.freed_rows:
            del self.rows[row]
        for new in out.new_requests:
            assert new.row not in self.rows, "the row is taken"
            self.rows[new.row] = EmulatedRow(list(new.token_ids), list(new.block_ids), new.sequence_slot)
            if new.sequence_slot >= 0 and new.reset_sequence_state:
                self.slots[new.sequence_slot] = ()
        for copy in out.snapshot_copies:
            if copy.restore:
                self.slots[copy.sequence_slot] = self.snapshots[copy.snapshot_id]
        sampled = [done for part in out.rows if (done := self._compute(part)) is not None]
        for copy in out.snapshot_copies:
            if not copy.restore:
                self.snapshots[copy.snapshot_id] = self.slots[copy.sequence_slot]
        return StepResult(step=out.step, sampled=sampled, forward_s=0.0, sample_s=0.0)

    def _compute(self, part: Any) -> SampledRow | None:
        row = self.rows[part.row]
        row.block_ids += part.new_block_ids
        assert len(set(row.block_ids)) == len(row.block_ids), "a block is twice in one table"
        self.computed_tokens += part.num_tokens
        end = part.start + part.num_tokens
        for position in range(part.start, end):
            self._write(row, position)
        self._check(row, end)
        if row.slot >= 0:
            assert self.slots[row.slot] == tuple(row.token_ids[: part.start]), "the sequence state is another one's"
            self.slots[row.slot] = tuple(row.token_ids[:end])
        assert part.sample == (end == len(row.token_ids)), "sample exactly at the last known token"
        if not part.sample:
            return None
        tokens = []
        for _ in range(self.step_tokens):
            tokens.append(emulated_next_token(row.token_ids))
            row.token_ids.append(tokens[-1])
            if len(tokens) < self.step_tokens:
                self._write(row, len(row.token_ids) - 1)
        return SampledRow(part.row, tokens)

    def _write(self, row: EmulatedRow, position: int) -> None:
        size = self.settings.block_size
        self.kv[row.block_ids[position // size], position % size] = row.token_ids[position]

    def _check(self, row: EmulatedRow, end: int) -> None:
        size = self.settings.block_size
        read = [self.kv.get((row.block_ids[p // size], p % size)) for p in range(end)]
        assert read == row.token_ids[:end], "the KV read is not the request's own"


@dataclass
class EngineDriver:
    """Drives an Engine and sorts what it reports."""

    engine: Engine
    runner: Any
    now_s: float = 0.0
    outputs: dict[RequestKey, list[Output]] = field(default_factory=dict)
    progress: list[PrefillProgress] = field(default_factory=list)
    wanted: list[KVWanted] = field(default_factory=list)
    onboards: list[OnboardWanted] = field(default_factory=list)
    exported: list[StateExported] = field(default_factory=list)
    pinned: list[BlocksPinned] = field(default_factory=list)
    suspended: list[Suspended] = field(default_factory=list)
    stays: list[Stays] = field(default_factory=list)
    moves_wanted: list[MoveWanted] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def submit(self, name: str, token_ids: list[int], *, stage: str = "whole", **options: Any) -> RequestKey:
        """Options of Submit and of SamplingParams, mixed."""
        sampling = {k: options.pop(k) for k in list(options) if k in SamplingParams.__struct_fields__}
        key = options.pop("key", RequestKey(name))
        options.setdefault("prompt_tokens", len(token_ids))
        options.setdefault("hash_salt", b"r" * 16)
        self.engine.handle(
            Submit(key=key, stage=stage, token_ids=token_ids, sampling=SamplingParams(**sampling), **options)  # type: ignore[arg-type]
        )
        return key

    def step(self, seconds: float = 0.01) -> bool:
        """One step, after which the clock has moved."""
        worked, reports = self.engine.step(self._sort)
        self.now_s += seconds
        self._sort(reports)
        return worked

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is left to compute."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, key: RequestKey) -> list[int]:
        """All output tokens; checks that positions follow each other."""
        tokens: list[int] = []
        first = self.outputs[key][0].first_position if key in self.outputs else 0
        for output in self.outputs.get(key, []):
            assert output.first_position == first + len(tokens), "a gap or a repeat in the stream"
            tokens += output.token_ids
        return tokens

    def finish(self, key: RequestKey) -> str | None:
        """Why the request ended; checks that it ended at most once."""
        ends = [output.finish for output in self.outputs.get(key, []) if output.finish]
        assert len(ends) <= 1, "a request ended twice"
        return ends[0] if ends else None

    def assert_nothing_held(self) -> None:
        """All counters are back at zero."""
        state, cache = self.engine.scheduler.state, self.engine.cache
        cache.check_invariants()
        assert cache.used_blocks == 0, f"{cache.used_blocks} blocks are still used"
        assert cache.used_snapshots == 0
        assert cache.pinned_blocks == 0
        assert state.rows.num_free == state.rows.size
        assert state.slots.num_free == state.slots.size
        assert len(state.in_flight) == 0
        held = (state.requests, state.running, state.transferring, state.held, state.reservations, state.pins)
        assert not any(held), "requests are left"
        assert len(state.waiting) == 0

    def _sort(self, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case StepReport():
                    self.reports.append(report)
                    for output in report.outputs:
                        self.outputs.setdefault(output.key, []).append(output)
                case PrefillProgress():
                    self.progress.append(report)
                case KVWanted():
                    self.wanted.append(report)
                case OnboardWanted():
                    self.onboards.append(report)
                case StateExported():
                    self.exported.append(report)
                case BlocksPinned():
                    self.pinned.append(report)
                case Suspended():
                    self.suspended.append(report)
                case Stays():
                    self.stays.append(report)
                case MoveWanted():
                    self.moves_wanted.append(report)


def _groups(snapshot_interval: int) -> tuple[KVGroupSpec, ...]:
    paged = KVGroupSpec(name="paged", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=2)
    state = KVGroupSpec(
        name="state",
        kind="state",
        layers=(0,),
        dtype="float32",
        num_heads=1,
        head_values=2,
        snapshot_interval_tokens=snapshot_interval,
    )
    return (paged, state) if snapshot_interval else (paged,)


@pytest.fixture
def emulated_service() -> Callable[..., EngineDriver]:
    """make(num_blocks=..., snapshot_interval=..., num_snapshots=..., **settings) -> EngineDriver."""

    def make(num_blocks: int = 64, snapshot_interval: int = 0, num_snapshots: int = 16, **options: Any) -> EngineDriver:
        defaults = EngineSettings(
            model_dir="",
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            admission_headroom_tokens=8,
        )
        fields = {name: getattr(defaults, name) for name in EngineSettings.__struct_fields__}
        settings = EngineSettings(**(fields | options))
        runner = EmulatedRunner(settings, _groups(snapshot_interval), num_blocks, num_snapshots)
        holder: list[EngineDriver] = []
        engine = Engine(settings, runner, clock=lambda: holder[0].now_s if holder else 0.0)
        holder.append(EngineDriver(engine, runner))
        return holder[0]

    return make


@pytest.fixture
def emulated_continuation() -> Callable[[list[int], int], list[int]]:
    """What the emulated model says after a prompt."""

    def continuation(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(emulated_next_token(tokens))
        return tokens[len(prompt) :]

    return continuation


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_checkpoint(architecture) -> its folder."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_tiny(architecture, tmp_path_factory.mktemp("model") / architecture)
        return made[architecture]

    return make


@pytest.fixture
def engine_driver() -> type[EngineDriver]:
    """The service's side of an engine that a test has made."""
    return EngineDriver


@pytest.fixture
def real_service(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., EngineDriver]:
    """make(architecture, **settings) -> EngineDriver over the real runner."""

    def make(architecture: str, **options: Any) -> EngineDriver:
        fields = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 8, "torch_threads": 1, "num_snapshots": 32}
        settings = EngineSettings(model_dir=str(tiny_checkpoint(architecture)), **(fields | options))
        runner = ModelRunner(settings, TensorParallel(0, 1, ""))
        runner.warm_up()
        holder: list[EngineDriver] = []
        engine = Engine(settings, runner, clock=lambda: holder[0].now_s if holder else 0.0)
        holder.append(EngineDriver(engine, runner))
        return holder[0]

    return make
