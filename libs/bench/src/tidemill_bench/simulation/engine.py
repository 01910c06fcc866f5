"""One engine of a fleet: the product's PrefixCache under continuous batching with chunked prefill, in simulated time.

A step takes decoding rows first, then prompt chunks, then new requests, within a budget of tokens. A stretch of steps
that only decode is one action: nothing in it changes until a row ends, needs a block, or a request arrives.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_bench.simulation.tiers import LowerTiers
from tidemill_bench.simulation.timing import EngineTiming
from tidemill_bench.simulation.trace import ROOT, TraceRequest
from tidemill_engine.step_cost import MeasuredCost
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.runs import CacheEvent
from tidemill_kvcache.sequence import CachedSequence
from tidemill_kvcache.step_cost import StepShape


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Sizes of an engine."""

    num_blocks: int = 4096
    block_size: int = 512
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    timing: EngineTiming = field(default_factory=EngineTiming)


@dataclass(slots=True, eq=False)
class Job:
    """A request at an engine."""

    request: TraceRequest
    token_ids: npt.NDArray[np.uint32]
    sequence: CachedSequence
    """Its blocks in the pool of the engine that has it."""
    prompt_tokens: int
    """To compute before the next output token; grows by what was emitted when the request is preempted."""
    computed: int = 0
    generated: int = 0
    hashes: Sequence[bytes] = ()
    """Of the full blocks of the prompt."""
    peers: "Sequence[SimulatedEngine]" = ()
    """Other engines that may have more of the prompt."""
    chunk: int = 0
    """Tokens that the running step computes."""
    fetched: bool = False
    """Its blocks of lower tiers have been asked for."""
    cached_l1: int = 0
    cached_l2: int = 0
    cached_l3: int = 0
    first_token_s: float = -1.0

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed."""
        return self.computed >= self.prompt_tokens


class SimulatedEngine:
    """Runs jobs; tells its owner of first tokens, ends and cache events."""

    def __init__(
        self,
        clock: SimulatedClock,
        shape: EngineShape,
        on_first_token: Callable[[Job], None],
        on_end: Callable[[Job], None],
        on_cache_events: Callable[[list[CacheEvent]], None],
        tiers: LowerTiers | None = None,
        on_prefilled: Callable[[Job], None] | None = None,
    ) -> None:
        """`on_prefilled`: takes over each job that has more to decode than its first token, with its blocks."""
        self.shape = shape
        self.cache = PrefixCache(shape.num_blocks, shape.block_size)
        self.measures = MeasuredCost()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_steps = 0
        """Actions so far: whoever has seen this number has seen the present state."""
        self._clock = clock
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._on_cache_events = on_cache_events
        self._tiers = tiers
        self._on_prefilled = on_prefilled
        self._to_come: deque[tuple[Job, Callable[[int], float], Callable[[], None]]] = deque()
        """Jobs of other engines that there is no room for yet."""
        self._step = 0
        """Names the planned end of a step; an end of another name was put off."""
        self._busy = False
        self._stretch: tuple[float, float, int] | None = None
        """(start, seconds of a step, steps) of the running stretch of pure decoding."""

    @property
    def prefill_tokens_ahead(self) -> int:
        """Prompt tokens still to compute, as the engine's scheduler counts them."""
        return sum(job.prompt_tokens - job.computed for job in (*self.waiting, *self.running) if not job.is_decoding)

    def submit(self, request: TraceRequest, hashes: Sequence[bytes], peers: "Sequence[SimulatedEngine]" = ()) -> None:
        """A request arrives now, with the hashes of its full blocks."""
        token_ids, sequence = request.token_ids(self.shape.block_size), self.cache.open(ROOT)
        self.waiting.append(Job(request, token_ids, sequence, request.input_tokens, hashes=hashes, peers=peers))
        self._wake()

    def held_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many of the first hashes are in its pool or host memory."""
        in_pool = self.cache.cached_depth(hashes)
        return in_pool + (self._tiers.held(hashes[in_pool:]) if self._tiers else 0)

    def take_over(self, job: Job, transfer_s: Callable[[int], float], on_arrival: Callable[[], None]) -> None:
        """A job goes on here, as soon as there is room: `transfer_s` (of blocks that are not here) later it decodes."""
        self._to_come.append((job, transfer_s, on_arrival))
        self._admit()

    def release(self, sequence: CachedSequence) -> None:
        """A job that went elsewhere is there: what it held here may be evicted."""
        self.cache.free(sequence)
        self._wake()

    def _admit(self) -> None:
        while self._to_come:
            job, transfer_s, on_arrival = self._to_come[0]
            sequence = self.cache.open(ROOT)
            held = self.cache.match_prefix(sequence, job.token_ids[: job.computed], job.computed).num_blocks
            if self.cache.allocate(sequence, job.computed + 1) is None:
                self.cache.free(sequence)
                return
            self._to_come.popleft()
            job.sequence = sequence
            lacking = -(-job.computed // self.shape.block_size) - held
            self._clock.at(self._clock.now_s + transfer_s(lacking), partial(self._arrived, job, on_arrival))

    def _arrived(self, job: Job, on_arrival: Callable[[], None]) -> None:
        on_arrival()
        self.cache.commit(job.sequence, job.token_ids, job.computed)
        self.running.append(job)
        self._tell_cache_events()
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._start_step()
        elif self._stretch is not None:
            self._cut_stretch()

    def _cut_stretch(self) -> None:
        """Ends the stretch with the step that runs now."""
        assert self._stretch is not None, "a stretch runs"
        start_s, step_s, steps = self._stretch
        done = min(steps, max(1, math.ceil((self._clock.now_s - start_s) / step_s)))
        self._plan_stretch(start_s, step_s, done)

    def _start_step(self) -> None:
        budget = self.shape.max_num_batched_tokens
        rows = self._rows_with_blocks()
        budget -= len(rows)
        prefills = self._prefill_chunks(budget)
        if not rows and not prefills:
            self._busy = False
            return
        self._busy = True
        use = self.cache.used_blocks / self.cache.num_blocks
        prompt_tokens = sum(job.chunk for job in prefills)
        decode_s = self.shape.timing.decode_s(use) if rows else 0.0
        if prefills:
            prefill_s = self.shape.timing.prefill_s(prompt_tokens)
            self.measures.observe(_shape(rows, prefills), prefill_s + decode_s)
            self._plan_end(self._clock.now_s + prefill_s + decode_s, lambda: self._end_step(rows, prefills, 1))
        else:
            self.measures.observe(_shape(rows, []), decode_s)
            self._rows = rows
            self._plan_stretch(self._clock.now_s, decode_s, self._steps_left(rows))

    def _plan_stretch(self, start_s: float, step_s: float, steps: int) -> None:
        self._stretch = (start_s, step_s, steps)
        self._plan_end(start_s + steps * step_s, lambda: self._end_step(self._rows, [], steps))

    def _plan_end(self, when_s: float, end: Callable[[], None]) -> None:
        self._step += 1
        name = self._step
        self._clock.at(when_s, lambda: end() if name == self._step else None)

    def _steps_left(self, rows: list[Job]) -> int:
        """Until one of them ends or needs a block."""
        size = self.shape.block_size
        ends = min(job.request.output_tokens - job.generated for job in rows)
        return min(ends, min(len(job.sequence.block_ids) * size - job.computed for job in rows))

    def _rows_with_blocks(self) -> list[Job]:
        """Decoding jobs that have room for one more token; where there is none, the youngest jobs give way."""
        size = self.shape.block_size
        decoding = [job for job in self.running if job.is_decoding]
        if all(job.computed < len(job.sequence.block_ids) * size for job in decoding):
            return decoding
        rows: list[Job] = []
        for job in decoding:
            if job not in self.running:
                continue
            while self.cache.allocate(job.sequence, job.computed + 1) is None:
                self._preempt(self.running[-1])
                if job not in self.running:
                    break
            else:
                rows.append(job)
        return [job for job in rows if job in self.running]

    def _preempt(self, job: Job) -> None:
        """Its blocks go; what it emitted becomes part of what it computes again."""
        self.running.remove(job)
        self.cache.free(job.sequence)
        job.prompt_tokens = job.request.input_tokens + job.generated
        job.computed = 0
        self.waiting.appendleft(job)

    def _prefill_chunks(self, budget: int) -> list[Job]:
        chosen = []
        for job in self.running:
            if budget > 0 and not job.is_decoding and self._take_chunk(job, budget):
                budget -= job.chunk
                chosen.append(job)
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_num_seqs:
            job = self.waiting[0]
            if job.computed == 0:
                self._match(job)
                if self._start_fetch(job):
                    continue
            if not self._take_chunk(job, budget):
                self.cache.free(job.sequence)
                job.computed = 0
                break
            self.waiting.popleft()
            self.running.append(job)
            budget -= job.chunk
            chosen.append(job)
        return chosen

    def _match(self, job: Job) -> None:
        # The last token is always computed, for its logits.
        match = self.cache.match_prefix(job.sequence, job.token_ids[: job.prompt_tokens], job.prompt_tokens - 1)
        job.computed = match.num_tokens
        if job.first_token_s < 0:
            job.cached_l1 = match.num_tokens

    def _start_fetch(self, job: Job) -> bool:
        """Whether the job leaves the queue until blocks of lower tiers are in the pool."""
        rate = self.measures.prefill_tokens_per_s
        if self._tiers is None or job.fetched or rate == 0.0:
            return False
        job.fetched = True
        held = job.computed // self.shape.block_size
        usable = (job.prompt_tokens - 1) // self.shape.block_size
        at_peer = max((peer.held_blocks(job.hashes) for peer in job.peers), default=0)
        fetch = self._tiers.fetch(job.hashes[held:usable], self.shape.block_size / rate, min(at_peer, usable) - held)
        from_memory = fetch.l2_blocks + fetch.peer_blocks
        end = held + from_memory + fetch.l3_blocks
        if end == held or self.cache.allocate(job.sequence, end * self.shape.block_size) is None:
            return False
        self.waiting.popleft()
        job.cached_l2 = from_memory * self.shape.block_size
        job.cached_l3 = fetch.l3_blocks * self.shape.block_size
        self._clock.at(self._clock.now_s + fetch.seconds, lambda: self._fetched(job, end))
        return True

    def _fetched(self, job: Job, end: int) -> None:
        self.cache.adopt(job.sequence, end - job.computed // self.shape.block_size, job.token_ids)
        job.computed = end * self.shape.block_size
        self.waiting.appendleft(job)
        self._tell_cache_events()
        self._wake()

    def _take_chunk(self, job: Job, budget: int) -> bool:
        chunk = min(job.prompt_tokens - job.computed, budget)
        if self.cache.allocate(job.sequence, job.computed + chunk) is None:
            return False
        job.chunk = chunk
        return True

    def _end_step(self, rows: list[Job], prefills: list[Job], steps: int) -> None:
        self._stretch = None
        self.num_steps += 1
        for job in prefills:
            job.computed += job.chunk
            self.cache.commit(job.sequence, job.token_ids, job.computed)
            if job.is_decoding:
                self._emit_first(job)
        for job in rows:
            job.computed += steps
            if job.computed % self.shape.block_size == 0:
                self.cache.commit(job.sequence, job.token_ids, job.computed)
            job.generated += steps
            if job.generated >= job.request.output_tokens:
                self._finish(job)
        self._tell_cache_events()
        self._admit()
        self._start_step()

    def _tell_cache_events(self) -> None:
        events = self.cache.take_events()
        if events:
            self._on_cache_events(events)
            if self._tiers is not None:
                self._tiers.follow(events)

    def _emit_first(self, job: Job) -> None:
        """The token that ends a prompt; after a preemption not the first one of all."""
        job.generated += 1
        if job.first_token_s < 0:
            job.first_token_s = self._clock.now_s
            self._on_first_token(job)
        if job.generated >= job.request.output_tokens:
            self._finish(job)
        elif self._on_prefilled is not None:
            self.running.remove(job)
            self._on_prefilled(job)

    def _finish(self, job: Job) -> None:
        self.running.remove(job)
        self.cache.free(job.sequence)
        self._on_end(job)


def _shape(rows: list[Job], prefills: list[Job]) -> StepShape:
    """What a step costs by."""
    return StepShape(
        prefill_tokens=sum(job.chunk for job in prefills),
        prefill_context=sum(job.chunk * (job.computed + job.chunk / 2) for job in prefills),
        decode_rows=len(rows),
        decode_context=sum(job.computed for job in rows),
    )
