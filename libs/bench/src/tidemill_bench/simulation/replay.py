"""Replays a trace on a fleet of engines under one placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tidemill_bench.simulation.capacity import Targets
from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_bench.simulation.engine import EngineShape, Job, SimulatedEngine
from tidemill_bench.simulation.hand_over import HandOver, Link
from tidemill_bench.simulation.index_feed import BusFaults, EventSource, IndexFeed
from tidemill_bench.simulation.mesh import TidemillRouter
from tidemill_bench.simulation.outcome import Outcome
from tidemill_bench.simulation.placement import DynamoFormula, Placement, RoundRobin
from tidemill_bench.simulation.tiers import LowerTiers, TierShape, host_blocks, store_blocks
from tidemill_bench.simulation.trace import TraceRequest
from tidemill_router.candidate import ModelFacts
from tidemill_router.settings import RouterSettings


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """What a replay runs on."""

    num_engines: int = 8
    prefill_engines: int = 0
    """The first so many compute prompts, the others decode; 0: all do both."""
    engine: EngineShape = field(default_factory=EngineShape)
    faults: BusFaults = field(default_factory=BusFaults)
    settings: RouterSettings = field(default_factory=RouterSettings)
    tiers: TierShape = field(default_factory=TierShape)
    kv_bytes_per_token: int = 70_272
    """An MLA cache of 61 layers."""
    hand_over: HandOver = field(default_factory=HandOver)


class Fleet:
    """Engines with their event sources, before a placement is chosen."""

    def __init__(self, shape: FleetShape, is_enough: Callable[[Job, float], bool] = lambda job, ended_s: False) -> None:
        self.shape = shape
        self.stopped = False
        self._is_enough = is_enough
        self.clock = SimulatedClock()
        self.feed = IndexFeed(self.clock, shape.faults)
        self.sources: list[EventSource] = [self.feed.source(f"worker-{i}") for i in range(shape.num_engines)]
        self._store = store_blocks(shape.tiers, self.feed.source("kvstore-0", has_snapshot=False).publish)
        self.placement: Placement = RoundRobin(shape.num_engines)
        self.ended: list[tuple[Job, int, float]] = []
        """(job, the engine that computed its prompt, when)."""
        self.engines = [self._engine(number) for number in range(shape.num_engines)]
        self._block_bytes = shape.kv_bytes_per_token * shape.engine.block_size
        chunk_bytes = shape.kv_bytes_per_token * shape.engine.max_num_batched_tokens
        self._links = [Link(shape.hand_over, chunk_bytes) for _ in range(shape.prefill_engines)]
        self._computed_at: dict[int, int] = {}

    def arrive(self, request: TraceRequest, hashes: Sequence[bytes]) -> None:
        """A request comes now."""
        number = self._computed_at[request.index] = self.placement.place(request, hashes)
        named = self.placement.take_sources(request) if isinstance(self.placement, TidemillRouter) else []
        peers = [self.engines[number] for number in named] if self.shape.tiers.peer_fetch else []
        self.engines[number].submit(request, hashes, peers)

    def _engine(self, number: int) -> SimulatedEngine:
        return SimulatedEngine(
            self.clock,
            self.shape.engine,
            lambda job: self.placement.prefilled(job),
            self._end,
            self.sources[number].publish_cache_events,
            self._tiers(number) if self.shape.tiers.l2_blocks or self.shape.tiers.l3_blocks else None,
            self._hand_over if number < self.shape.prefill_engines else None,
        )

    def _tiers(self, number: int) -> LowerTiers:
        block_bytes = self.shape.kv_bytes_per_token * self.shape.engine.block_size
        host = host_blocks(self.shape.tiers, self.sources[number].publish)
        return LowerTiers(self.clock, self.shape.tiers, block_bytes, host, self._store)

    def _hand_over(self, job: Job) -> None:
        router = self.placement
        assert isinstance(router, TidemillRouter), "only the product's router places both stages"
        number = self._computed_at[job.request.index]
        source, link, sequence = self.engines[number], self._links[number], job.sequence

        def arrived() -> None:
            router.handed_over(job)
            source.release(sequence)

        self.engines[router.place_decode(job)].take_over(
            job, lambda blocks: link.send_s(blocks * self._block_bytes, self.clock.now_s), arrived
        )

    def _end(self, job: Job) -> None:
        self.placement.ended(job)
        self.ended.append((job, self._computed_at[job.request.index], self.clock.now_s))
        self.stopped = self.stopped or self._is_enough(job, self.clock.now_s)


MakePlacement = Callable[[Fleet], Placement]


def round_robin(fleet: Fleet) -> Placement:
    """One after the other."""
    return RoundRobin(fleet.shape.num_engines)


def dynamo_formula(fleet: Fleet) -> Placement:
    """Dynamo's KV mode."""
    names = [source.domain.instance for source in fleet.sources]
    return DynamoFormula(fleet.shape.engine.block_size, fleet.feed, names, seed=0)


def tidemill(fleet: Fleet) -> Placement:
    """The product's router with its settings."""
    return _router(fleet, sees_cache=True)


def load_only(fleet: Fleet) -> Placement:
    """The product's router, told of no prefix."""
    return _router(fleet, sees_cache=False)


def _router(fleet: Fleet, *, sees_cache: bool) -> TidemillRouter:
    shape = fleet.shape
    facts = ModelFacts(shape.engine.block_size, shape.kv_bytes_per_token)
    return TidemillRouter(
        fleet.clock,
        fleet.engines,
        fleet.sources,
        fleet.feed,
        replace(shape.settings, peer_fetch=shape.tiers.peer_fetch),
        facts,
        prefill_engines=shape.prefill_engines,
        sees_cache=sees_cache,
        report_delay_s=shape.faults.delay_s,
        transfer_bytes_per_s=shape.tiers.l3_bytes_per_s,
    )


def replay(
    requests: Sequence[TraceRequest],
    hashes: Sequence[Sequence[bytes]],
    shape: FleetShape,
    make_placement: MakePlacement,
    *,
    speed: float = 1.0,
) -> Outcome:
    """Runs all requests to their end; `speed` divides the time between arrivals, `hashes` are the prompts' blocks."""
    return _outcome(run_fleet(requests, hashes, shape, make_placement, speed=speed), speed)


def replay_within(
    requests: Sequence[TraceRequest],
    hashes: Sequence[Sequence[bytes]],
    shape: FleetShape,
    make_placement: MakePlacement,
    targets: Targets,
    *,
    speed: float,
) -> Outcome | None:
    """As `replay`, of the requests that are judged; None, early, when too many have missed their targets."""
    most = targets.most_misses(len(requests))
    misses = 0

    def is_enough(job: Job, ended_s: float) -> bool:
        nonlocal misses
        misses += targets.misses(job.request, job.first_token_s, ended_s, speed)
        return misses > most

    fleet = run_fleet(requests, hashes, shape, make_placement, speed=speed, is_enough=is_enough)
    return _outcome(fleet, speed).after(targets.warm_up_requests) if misses <= most else None


def run_fleet(
    requests: Sequence[TraceRequest],
    hashes: Sequence[Sequence[bytes]],
    shape: FleetShape,
    make_placement: MakePlacement,
    *,
    speed: float = 1.0,
    is_enough: Callable[[Job, float], bool] = lambda job, ended_s: False,
) -> Fleet:
    """The fleet as it is when the last request has ended, or `is_enough` said so of one and its end."""
    fleet = Fleet(shape, is_enough)
    fleet.placement = make_placement(fleet)
    for request in requests:
        fleet.clock.at(request.arrival_s / speed, partial(fleet.arrive, request, hashes[request.index]))
    fleet.clock.run(lambda: fleet.stopped or len(fleet.ended) == len(requests))
    return fleet


def _outcome(fleet: Fleet, speed: float) -> Outcome:
    ended = sorted(fleet.ended, key=lambda item: item[0].request.index)
    jobs = [job for job, _, _ in ended]
    arrival = np.array([job.request.arrival_s / speed for job in jobs])
    first = np.array([job.first_token_s for job in jobs])
    finished = np.array([when for _, _, when in ended])
    steps = np.array([max(1, job.request.output_tokens - 1) for job in jobs])
    return Outcome(
        arrival,
        np.array([float(job.request.input_tokens) for job in jobs]),
        np.array([float(job.cached_l1) for job in jobs]),
        np.array([float(job.cached_l2) for job in jobs]),
        np.array([float(job.cached_l3) for job in jobs]),
        first - arrival,
        (finished - first) / steps,
        np.array([number for _, number, _ in ended]),
        finished,
    )
