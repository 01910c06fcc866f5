"""One engine's real scheduler and prefix cache over simulated time: each step takes what a true cost says.

The scheduler sees only the clock, so it has to learn the cost as it does in service. `EngineClock` drives a real engine
as well: then steps take the time that they take.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tidemill_engine.engine import Engine
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages import Output, Release, Report, RequestKey, StepReport, Submit
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SampledRow, SchedulerOutput, StepResult
from tidemill_kvcache.step_cost import StepCost, StepShape

WORDS, STOP, LOOP = 1 << 20, 8, 9
"""Tokens that a simulated request emits: changing ones from `WORDS` on, then one that stops it; or one in a loop."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a workload."""

    at_s: float
    token_ids: list[int]
    output_tokens: int = 1
    """Where it stops by itself."""
    max_tokens: int = 1
    stage: str = "prefill"
    tenant: str = ""
    tenant_weight: float = 1.0
    priority: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


@dataclass
class Life:
    """What became of it; times are since its arrival."""

    arrival: Arrival
    first_token_s: float = math.nan
    end_s: float = math.nan
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    """Between two of its tokens."""
    num_late_tokens: int = 0
    """Later after the one before than the target for output tokens."""
    finish: str = ""
    error: str = ""
    last_token_at_s: float = math.nan


@dataclass
class CostedRunner:
    """Computes nothing: a step moves the clock by its true cost, times noise."""

    cost: StepCost
    num_blocks: int
    lengths: dict[int, int] = field(default_factory=dict)
    """First token of a prompt -> output tokens until its stop token; first tokens name requests here. Those without a
    length repeat one token until they are stopped."""
    noise: float = 0.05
    """Standard deviation of the logarithm of a step's time over its cost."""
    context_tokens: int = 1 << 20
    vocab_size: int = 1 << 31
    num_snapshots: int = 0
    now_s: float = 0.0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    groups: tuple[KVGroupSpec, ...] = (
        KVGroupSpec(name="paged", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=2),
    )
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Row -> (output tokens so far, output tokens wanted or 0)."""
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def execute(self, out: SchedulerOutput) -> StepResult:
        """One step."""
        for row in out.freed_rows:
            del self._rows[row]
        for new in out.new_requests:
            wanted = self.lengths.get(new.token_ids[0], 0)
            self._rows[new.row] = (len(new.token_ids) - new.prompt_tokens, wanted)
        shape = shape_of(out)
        self.now_s += self.cost.step_s(shape) * self._random.lognormvariate(0.0, self.noise)
        self.num_steps += 1
        self.num_prefill_tokens += shape.prefill_tokens
        self.num_decode_rows += shape.decode_rows
        sampled = [SampledRow(row.row, [self._next_token(row.row)]) for row in out.rows if row.sample]
        return StepResult(step=out.step, sampled=sampled, forward_s=0.0, sample_s=0.0)

    def _next_token(self, row: int) -> int:
        count, wanted = self._rows[row]
        self._rows[row] = (count + 1, wanted)
        if not wanted:
            return LOOP
        return STOP if count + 1 >= wanted else WORDS + count % WORDS


def shape_of(out: SchedulerOutput) -> StepShape:
    """What a step costs by."""
    chunks = [row for row in out.rows if not row.sample or row.num_tokens > 1]
    decodes = [row for row in out.rows if row.sample and row.num_tokens == 1]
    return StepShape(
        prefill_tokens=sum(row.num_tokens for row in chunks),
        prefill_context=sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in chunks),
        decode_rows=len(decodes),
        decode_context=sum(row.start + 1 for row in decodes),
    )


def simulated(settings: EngineSettings, runner: CostedRunner) -> "EngineClock":
    """The product's engine over a runner that computes nothing."""

    def skip_to(when_s: float) -> None:
        runner.now_s = when_s

    return EngineClock(Engine(settings, runner, lambda: runner.now_s), lambda: runner.now_s, skip_to)


class EngineClock:
    """Brings a workload to an engine at its times and notes what becomes of each request."""

    def __init__(
        self,
        engine: Engine,
        now_s: Callable[[], float],
        skip_to: Callable[[float], None],
        stop_token: int = STOP,
    ) -> None:
        self.engine = engine
        self._now_s = now_s
        self._skip_to = skip_to
        self._stop_token = stop_token
        self.lives: dict[RequestKey, Life] = {}

    def run(self, arrivals: Sequence[Arrival], *, after_step: Callable[[], None] = lambda: None) -> list[Life]:
        """Until every request has ended; RuntimeError when the engine stands still with some left."""
        pending = sorted(arrivals, key=lambda arrival: arrival.at_s)
        start_s, next_index, live = self._now_s(), 0, 0
        pending = [replace(arrival, at_s=start_s + arrival.at_s) for arrival in pending]
        while next_index < len(pending) or live:
            while next_index < len(pending) and pending[next_index].at_s <= self._now_s():
                self._submit(next_index, pending[next_index])
                next_index, live = next_index + 1, live + 1
            worked, reports = self.engine.step()
            live -= self._note(reports)
            after_step()
            if not worked and (next_index < len(pending) or live):
                upcoming = pending[next_index].at_s if next_index < len(pending) else math.inf
                wake_s = min(upcoming, self.engine.next_timer_s)
                if wake_s == math.inf:
                    raise RuntimeError(f"the engine stands still with {live} requests")
                self._skip_to(wake_s)
        return list(self.lives.values())

    def _submit(self, index: int, arrival: Arrival) -> None:
        key = RequestKey(f"r{index}")
        self.lives[key] = Life(arrival)
        sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, stop_token_ids=[self._stop_token])
        submit = Submit(
            key=key,
            stage=arrival.stage,  # type: ignore[arg-type]
            token_ids=arrival.token_ids,
            prompt_tokens=len(arrival.token_ids),
            sampling=sampling,
            hash_salt=bytes(16),
            tenant=arrival.tenant,
            tenant_weight=arrival.tenant_weight,
            priority=arrival.priority,
            deadline_s=1e9,
            slo_ttft_s=arrival.slo_ttft_s,
            slo_tpot_s=arrival.slo_tpot_s,
        )
        self.engine.handle(submit)

    def _note(self, reports: list[Report]) -> int:
        ended = 0
        for report in reports:
            for output in report.outputs if isinstance(report, StepReport) else []:
                self._take(output)
                ended += output.finish is not None
        return ended

    def _take(self, output: Output) -> None:
        life, now_s = self.lives[output.key], self._now_s()
        if output.token_ids:
            if life.num_tokens == 0:
                life.first_token_s = now_s - life.arrival.at_s
            else:
                gap_s = now_s - life.last_token_at_s
                life.longest_gap_s = max(life.longest_gap_s, gap_s)
                life.num_late_tokens += 0 < life.arrival.slo_tpot_s < gap_s
            life.last_token_at_s = now_s
            life.num_tokens += len(output.token_ids)
        if output.finish is not None:
            life.end_s, life.finish = now_s - life.arrival.at_s, output.finish
            life.error = output.error.message if output.error else ""
            if output.finish == "prefilled":
                self.engine.handle(Release(output.key))
