"""The product's router over simulated engines: real placements, reservations, view, load reports and index."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, DomainRecord, MembershipRecord, ModelRef, Role
from tidemill.mesh.v1.router_pb2 import PlaceDecodeRequest, PlacePrefillRequest
from tidemill_bench.simulation.clock import SimulatedClock
from tidemill_bench.simulation.engine import Job, SimulatedEngine
from tidemill_bench.simulation.index_feed import REVISION, EventSource, IndexFeed
from tidemill_bench.simulation.trace import TraceRequest
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.step_cost_message import to_message
from tidemill_mesh.load import LoadSample
from tidemill_router.app import costs_of
from tidemill_router.candidate import ModelFacts
from tidemill_router.fences import Fences
from tidemill_router.report_times import ReportTimes
from tidemill_router.reservations import Reservations
from tidemill_router.router import Router
from tidemill_router.settings import RouterSettings
from tidemill_router.turnover import Turnover
from tidemill_router.view import MeshView

LOAD_INTERVAL_S = 0.25
"""A worker's default."""


@dataclass
class _Instances:
    records: dict[str, MembershipRecord] = field(default_factory=dict)
    connected: bool = True


@dataclass
class _Loads:
    by_holder: dict[Holder, LoadSample] = field(default_factory=dict)

    @property
    def samples(self) -> Mapping[Holder, LoadSample]:
        """Latest reports."""
        return self.by_holder


class TidemillRouter:
    """A mesh whose first `prefill_engines` engines compute prompts and the others decode.

    Without any the engines do both stages, as decode instances of a mesh without prefill instances.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        engines: Sequence[SimulatedEngine],
        sources: Sequence[EventSource],
        feed: IndexFeed,
        settings: RouterSettings,
        facts: ModelFacts,
        *,
        seed: int = 0,
        prefill_engines: int = 0,
        sees_cache: bool = True,
        report_delay_s: float = 0.0,
        transfer_bytes_per_s: float = 0.0,
    ) -> None:
        """`sees_cache` False: places by load alone."""
        self._clock = clock
        self._engines = engines
        self._names = [source.domain.instance for source in sources]
        self._domains = [source.domain for source in sources]
        self._sees_cache = sees_cache
        self._report_delay_s = report_delay_s
        self._transfer_bytes_per_s = transfer_bytes_per_s
        self._loads = _Loads()
        self._times = ReportTimes(clock)
        self._reported = [-1] * len(engines)
        self._reservation_of: dict[int, str] = {}
        self._decode_reservation_of: dict[int, str] = {}
        self._sources: dict[int, list[int]] = {}
        fences = Fences(clock)
        turnover = Turnover(settings.turnover_half_life_s, clock)
        self._reservations = Reservations("sim", float("inf"), clock, turnover)
        instances = _Instances()
        view = MeshView(instances, self._loads, fences, self._reservations, self._times, clock)
        for number, (name, engine) in enumerate(zip(self._names, engines, strict=True)):
            role = ROLE_PREFILL if number < prefill_engines else ROLE_DECODE
            instances.records[name] = _record(name, role, engine.shape.num_blocks)
            view.see(instances.records[name])
        self._router = Router(
            view,
            feed.index,
            self._reservations,
            lambda revision: facts,
            costs_of(settings),
            settings.max_queue_s,
            random.Random(seed),
        )
        self._gateway = InstanceRef(instance="gateway-0", incarnation="i")
        self._report_loads()

    def place(self, request: TraceRequest, hashes: Sequence[bytes]) -> int:
        """Asks the router as a gateway does."""
        asked = PlacePrefillRequest(
            request_id=str(request.index),
            gateway=self._gateway,
            model_revision=REVISION,
            prompt_tokens=request.input_tokens,
            block_hashes=self._told(hashes),
            max_tokens=request.output_tokens,
        )
        placed = self._router.place_prefill(asked)
        self._reservation_of[request.index] = placed.reservation_id
        self._sources[request.index] = [self._names.index(s.holder.domain.instance) for s in placed.sources]
        return self._names.index(placed.target.domain.instance)

    def take_sources(self, request: TraceRequest) -> list[int]:
        """Numbers of the engines that its placement named as holders of more."""
        return self._sources.pop(request.index)

    def place_decode(self, job: Job) -> int:
        """Asks where a computed prompt goes on."""
        asked = PlaceDecodeRequest(
            request_id=str(job.request.index),
            gateway=self._gateway,
            model_revision=REVISION,
            context_tokens=job.prompt_tokens,
            block_hashes=self._told(job.hashes),
            max_tokens=job.request.output_tokens,
        )
        placed = self._router.place_decode(asked)
        self._decode_reservation_of[job.request.index] = placed.reservation_id
        return self._names.index(placed.target.domain.instance)

    def handed_over(self, job: Job) -> None:
        """The gateway's report of the end of the first stage."""
        self._reservations.end(self._reservation_of[job.request.index], "done")
        self._reservation_of[job.request.index] = self._decode_reservation_of.pop(job.request.index)

    def _told(self, hashes: Sequence[bytes]) -> bytes:
        return join_hashes(hashes) if self._sees_cache else b""

    def prefilled(self, job: Job) -> None:
        """The gateway's report of the first token."""
        self._reservations.prefilled(self._reservation_of[job.request.index])

    def ended(self, job: Job) -> None:
        """The gateway's report of the end."""
        self._reservations.end(self._reservation_of.pop(job.request.index), "done")

    def _report_loads(self) -> None:
        for number, engine in enumerate(self._engines):
            holder = (self._names[number], 0)
            last = self._loads.by_holder.get(holder)
            if last is not None and self._reported[number] == engine.num_steps:
                self._deliver(holder, last.report, changed=False)
            else:
                self._reported[number] = engine.num_steps
                self._deliver(holder, self._report(number, engine), changed=True)
        self._clock.at(self._clock.now_s + LOAD_INTERVAL_S, self._report_loads)

    def _deliver(self, holder: Holder, report: LoadReport, *, changed: bool) -> None:
        def arrive() -> None:
            self._loads.by_holder[holder] = LoadSample(report, self._clock.now_s)
            if changed:
                self._times.on_report(report)

        if self._report_delay_s:
            self._clock.at(self._clock.now_s + self._report_delay_s, arrive)
        else:
            arrive()

    def _report(self, number: int, engine: SimulatedEngine) -> LoadReport:
        cache = engine.cache
        return LoadReport(
            domain=self._domains[number],
            waiting_requests=len(engine.waiting),
            running_requests=len(engine.running),
            waiting_prefill_tokens=engine.prefill_tokens_ahead,
            total_blocks=cache.num_blocks,
            free_blocks=cache.free_blocks,
            available_blocks=cache.available_blocks,
            cached_blocks=cache.cached_blocks,
            prefill_tokens_per_s=engine.measures.prefill_tokens_per_s,
            decode_step_s=engine.measures.decode_step_s,
            transfer_bytes_per_s=self._transfer_bytes_per_s,
            context_tokens=sum(job.computed for job in (*engine.waiting, *engine.running)),
            max_num_seqs=engine.shape.max_num_seqs,
            max_num_batched_tokens=engine.shape.max_num_batched_tokens,
            step_cost=to_message(engine.measures.model) if engine.measures.model.known else None,
        )


def _record(name: str, role: "Role.ValueType", num_blocks: int) -> MembershipRecord:
    return MembershipRecord(
        instance=name,
        incarnation="i",
        role=role,
        endpoint=f"{name}:1",
        domains=[DomainRecord(domain=0, epoch="e", num_blocks=num_blocks)],
        models=[ModelRef(name="m", revision=REVISION)],
    )
