"""One domain's engine: schedule -> execute -> commit, and what each step brought as reports for the service."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from tidemill_engine.kv_groups import KVGroupSpec, snapshot_interval_tokens
from tidemill_engine.messages import (
    BlocksCleared,
    BlocksCooling,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    Report,
    SnapshotsDropped,
    StepReport,
)
from tidemill_engine.scheduler import ModelLimits, Scheduler, SchedulerCommand
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SchedulerOutput, StepResult
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.runs import CacheEvent, Cleared, DroppedSnapshots, RemovedRun, StoredRun

_LOAD_INTERVAL_S = 0.1
_MAX_COOLING = 256


class Runner(Protocol):
    """What the engine needs of a model runner."""

    groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    num_snapshots: int
    context_tokens: int
    vocab_size: int

    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs a step on every rank of the domain."""


class StartedStep(Protocol):
    """A step that a runner has begun."""

    @property
    def may_run_ahead(self) -> bool:
        """The next decode step may begin before this one has been finished."""


@runtime_checkable
class OverlappingRunner(Protocol):
    """A runner that need not be waited for; steps finish in the order in which they began."""

    def begin(self, out: SchedulerOutput) -> StartedStep:
        """Starts a step."""

    def finish(self, started: Any) -> StepResult:
        """Waits for a step's tokens."""


class Engine:
    """Synchronous and single-threaded: commands go in between steps, reports come out of them."""

    def __init__(self, settings: EngineSettings, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        interval = snapshot_interval_tokens(runner.groups)
        self.cache = PrefixCache(
            runner.num_blocks,
            settings.block_size,
            num_snapshots=runner.num_snapshots if interval else 0,
            snapshot_interval_tokens=interval,
        )
        limits = ModelLimits(runner.context_tokens, runner.vocab_size, interval)
        self.scheduler = Scheduler(settings, limits, self.cache, clock)
        self._runner = runner
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self._started: StartedStep | None = None
        self._clock = clock
        self._step = 0
        self._load_sent_s = float("-inf")
        self._cooling_blocks = settings.cooling_blocks
        self._cooling: list[bytes] = []

    def handle(self, command: SchedulerCommand) -> None:
        """Takes a command; its reports come with the next step or tick."""
        self.scheduler.handle(command)

    def step(self, send_early: Callable[[list[Report]], None] = lambda _: None) -> tuple[bool, list[Report]]:
        """Runs a step if there is one; returns whether there was, and reports (none when nothing happened).

        What is known before the model runs (blocks wanted, aborts) goes to `send_early` and does not wait for it. With
        an overlapping runner the next decode step has begun, where it can, before this one's tokens are taken.
        """
        if self._started is not None:
            self._finish(self._started)
            return True, self._reports(heartbeat=False, idle=False)
        out = self.scheduler.schedule()
        if out is not None:
            early = self._reports(heartbeat=False, idle=False)
            if early:
                send_early(early)
            self._step = out.step
            if self._overlapping is None:
                self.scheduler.commit(self._runner.execute(out))
            else:
                self._finish(self._overlapping.begin(out))
        return out is not None, self._reports(heartbeat=False, idle=out is None)

    def tick(self) -> list[Report]:
        """The heartbeat of an idle engine."""
        return self._reports(heartbeat=True, idle=True)

    def _finish(self, started: StartedStep) -> None:
        """Begins the step after `started` if it may run ahead, then takes the tokens of `started`."""
        assert self._overlapping is not None
        ahead = self.scheduler.schedule_ahead() if started.may_run_ahead else None
        self._started = None if ahead is None else self._overlapping.begin(ahead)
        self.scheduler.commit(self._overlapping.finish(started))
        self._step = ahead.step if ahead is not None else self._step

    @property
    def next_timer_s(self) -> float:
        """When, on the clock, an idle engine must step again."""
        return self.scheduler.next_timer_s

    def _reports(self, *, heartbeat: bool, idle: bool) -> list[Report]:
        """Notices first, so that the service knows a request's blocks before its last output; answers to roll calls
        last, so that it has seen the ends of all that they miss."""
        notices = [*self.scheduler.take_notices(), *self._newly_cooling()]
        outputs = self.scheduler.take_outputs()
        events = [_to_message(event) for event in self.cache.take_events()]
        answers = self.scheduler.take_roll_answers()
        if not (heartbeat or outputs or events or notices or answers):
            return []
        report = StepReport(step=self._step, outputs=outputs, kv_events=events)
        now_s = self._clock()
        if heartbeat or idle or now_s - self._load_sent_s >= _LOAD_INTERVAL_S:
            report.load = self.scheduler.load_sample()
            self._load_sent_s = now_s
        return [*notices, report, *answers]

    def _newly_cooling(self) -> list[Report]:
        """Blocks that have come near eviction since the last report."""
        ahead = min(self._cooling_blocks - self.cache.free_blocks, _MAX_COOLING) if self._cooling_blocks else 0
        told, self._cooling = set(self._cooling), self.cache.coldest(ahead) if ahead > 0 else []
        fresh = [block_hash for block_hash in self._cooling if block_hash not in told]
        return [BlocksCooling(fresh)] if fresh else []


def _to_message(event: CacheEvent) -> KvEvent:
    match event:
        case StoredRun():
            return BlocksStored(event.parent, event.hashes, event.has_snapshot)
        case RemovedRun():
            return BlocksRemoved(event.hashes)
        case DroppedSnapshots():
            return SnapshotsDropped(event.hashes)
        case Cleared():
            return BlocksCleared()
