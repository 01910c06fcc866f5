"""A request's choices as one stream of tokens: carries out what the choices' state machines decide."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef, Target
from tidemill.mesh.v1.router_pb2 import PlaceDecodeRequest, PlaceDecodeResponse, PlacePrefillRequest, Report
from tidemill.mesh.v1.worker_pb2 import Finish, Logprobs, Submit
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.choice_run import ChoiceRun
from tidemill_gateway.flow.effects import Bounds
from tidemill_gateway.flow.leg import Leg
from tidemill_gateway.flow.placement import Placer
from tidemill_gateway.flow.plan import RequestPlan
from tidemill_gateway.flow.reservations import Reservation, Reservations
from tidemill_gateway.flow.worker_links import WorkerLinks
from tidemill_mesh.errors import MeshError

SAMPLING, GRAMMAR_FIELD = "sampling.", "sampling.grammar"
"""As workers call them."""


@dataclass(slots=True)
class Tokens:
    """New tokens of one choice; `finish` with its last."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    finish: "Finish.ValueType | None"


@dataclass(slots=True)
class PlacementRecord:
    """Where the first choice ran, for a caller who asks."""

    prefill_instance: str = ""
    decode_instance: str = ""
    prefill_terms: dict[str, float] = field(default_factory=dict)
    decode_terms: dict[str, float] = field(default_factory=dict)
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Mesh:
    """What every generation works with."""

    links: WorkerLinks
    placer: Placer
    reservations: Reservations
    gateway: Callable[[], InstanceRef]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a placement to its end even if its request ends before."""
    bounds: Bounds
    placement_wait_s: float
    resume_wait_s: float
    clock: Callable[[], float]


class Generation:
    """One live request. Its consumer calls `take` until all choices have finished, then `close`, on every path."""

    def __init__(self, plan: RequestPlan, mesh: Mesh, on_stalled_client: Callable[[], object]) -> None:
        self.plan = plan
        self.placement = PlacementRecord()
        self.started_at = mesh.clock()
        self.taken_at = self.started_at
        self.on_stalled_client = on_stalled_client
        self.runs = [ChoiceRun(plan, choice, self, mesh.bounds, mesh.clock) for choice in plan.choices]
        self._mesh = mesh
        self._ready: deque[Tokens] = deque()
        self._error: MeshError | None = None
        self._wake: asyncio.Future[None] | None = None
        self.on_ready: Callable[[], None] | None = None
        """Called soon after something came for the consumer, once for all that one engine step gave."""
        self._loop = asyncio.get_running_loop()
        self._call_due = False
        self._deadline: asyncio.TimerHandle | None = None

    # --- for the consumer --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all choices."""
        left_s = max(0.0, self.plan.deadline - self._mesh.clock())
        self._deadline = self._loop.call_later(left_s, self._expire)
        for run in self.runs:
            if not run.done:
                run.start()

    async def take(self) -> list[Tokens]:
        """The tokens that have come since the last call, at least one entry; raises what ended the request."""
        self.taken_at = self._mesh.clock()
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._wake = self._loop.create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._take_all()

    def take_ready(self) -> list[Tokens]:
        """The same without waiting: possibly nothing."""
        if not self._ready and self._error is not None:
            raise self._error
        return self._take_all()

    def _take_all(self) -> list[Tokens]:
        taken = list(self._ready)
        self._ready.clear()
        self.taken_at = self._mesh.clock()
        if self.plan.credit_tokens:
            for tokens in taken:
                self.runs[tokens.choice].consumed(len(tokens.token_ids))
        return taken

    def stop_choice(self, choice: int) -> None:
        """The choice's text is complete before its tokens are."""
        self.runs[choice].stop()
        self._ready = deque(tokens for tokens in self._ready if tokens.choice != choice)

    def close(self) -> None:
        """Ends whatever still runs; the consumer takes no more."""
        if self._deadline is not None:
            self._deadline.cancel()
        for run in self.runs:
            run.cancel()
        self._ready.clear()

    def abort(self, error: MeshError) -> None:
        """Ends the request from outside its consumer."""
        self._raise(error)

    @property
    def waits_for_client(self) -> bool:
        """Whether tokens lie here that the client has not taken."""
        return bool(self._ready)

    @property
    def has_news(self) -> bool:
        """Whether tokens, or an error, wait for the consumer."""
        return bool(self._ready) or self._error is not None

    @property
    def attempts(self) -> int:
        """Starts of the choice that needed the most."""
        return max((run.attempt for run in self.runs), default=0)

    # --- effects -----------------------------------------------------------------------------------------------------

    def place_prefill(self, run: ChoiceRun) -> None:
        """See Effects."""
        self._mesh.spawn(self._settled(run, run.attempt, self._place_prefill(run, run.attempt)))

    def place_decode(self, run: ChoiceRun, prefill: Leg) -> None:
        """See Effects."""
        self._mesh.spawn(self._settled(run, run.attempt, self._place_decode(run, run.attempt, prefill.target)))

    def place_move(self, run: ChoiceRun, source: Leg) -> None:
        """See Effects."""
        self._mesh.spawn(self._place_move(run, source))

    def stay(self, leg: Leg) -> None:
        """See Effects."""
        domain = leg.target.domain
        link = self._mesh.links.get(domain.instance, domain.incarnation)
        if link is not None:
            link.stay(leg)

    def open(self, leg: Leg, submit: Submit) -> None:
        """See Effects."""
        self._mesh.links.to(leg.target).open(leg, submit)

    def hand_over(self, leg: Leg, target: Target) -> None:
        """See Effects."""
        self._mesh.links.to(leg.target).hand_over(leg, target)

    def credit(self, leg: Leg, tokens: int) -> None:
        """See Effects."""
        self._mesh.links.to(leg.target).credit(leg, tokens)

    def close_leg(self, leg: Leg, *, abort: bool) -> None:
        """See Effects."""
        domain = leg.target.domain
        link = self._mesh.links.get(domain.instance, domain.incarnation)
        if link is not None:
            link.close(leg, abort=abort)

    def report(self, held: Reservation | None, kind: "Report.Kind.ValueType", *, instance_lost: bool = False,
               measured_s: float = 0.0, output_tokens: int = 0) -> None:  # fmt: skip
        """See Effects."""
        self._mesh.reservations.report(
            held, kind, instance_lost=instance_lost, measured_s=measured_s, output_tokens=output_tokens
        )

    def deliver(self, run: ChoiceRun, token_ids: Sequence[int], logprobs: Sequence[Logprobs],
                finish: "Finish.ValueType | None") -> None:  # fmt: skip
        """See Effects."""
        self._ready.append(Tokens(run.plan.index, token_ids, logprobs, finish))
        self._notify()

    def fail(self, run: ChoiceRun, error: MeshError) -> None:
        """See Effects."""
        if error.field.startswith(SAMPLING):
            named = self.plan.sampling_prefix + error.field.removeprefix(SAMPLING)
            field = self.plan.grammar_field if error.field == GRAMMAR_FIELD else named
            error = MeshError(error.code, error.message, field=field, limit=error.limit)
        self._raise(error)

    # --- placing -----------------------------------------------------------------------------------------------------

    async def _settled(self, run: ChoiceRun, attempt: int, placing: Coroutine[Any, Any, None]) -> None:
        """A placement that ends by a fault, or is cancelled, ends its choice too: nothing else would."""
        try:
            await placing
        except BaseException:
            run.place_failed(attempt, MeshError(errors_pb2.ERROR_CODE_INTERNAL, "the gateway failed to place a stage"))
            raise

    async def _place_prefill(self, run: ChoiceRun, attempt: int) -> None:
        plan, choice = self.plan, run.plan
        if attempt > 1:
            delays_s = self._mesh.bounds.attempt_delays_s
            await asyncio.sleep(delays_s[min(attempt - 2, len(delays_s) - 1)])
            if not run.awaits_placement(attempt):
                return
        request = PlacePrefillRequest(
            request_id=plan.request_id,
            choice=choice.index,
            attempt=attempt,
            gateway=self._mesh.gateway(),
            model_revision=plan.model_revision,
            tenant=plan.tenant,
            prompt_tokens=choice.prompt_tokens + len(run.emitted),
            block_hashes=choice.block_hashes,
            max_tokens=choice.sampling.max_tokens - len(run.emitted),
            priority=plan.priority,
            slo_ttft_s=plan.slo_ttft_s,
            slo_tpot_s=plan.slo_tpot_s,
            program_id=plan.program_id,
            excluded_instances=sorted(run.excluded),
            deadline_s=self._left_s(),
        )
        try:
            placed, bypassed = await self._mesh.placer.prefill(
                request, self._patience_s(run), lambda: run.awaits_placement(attempt)
            )
        except MeshError as error:
            run.place_failed(attempt, error)
            return
        if choice.index == 0:
            self.placement.prefill_instance = placed.target.domain.instance
            self.placement.prefill_terms = dict(placed.terms)
            if placed.whole:
                self.placement.decode_instance = placed.target.domain.instance
        self._mark(bypassed)
        held = self._hold(
            placed.reservation_id,
            placed.target.domain,
            placed.reservation_deadline_s,
            placed.whole,
            request.prompt_tokens,
        )
        run.prefill_placed(attempt, placed, held)

    async def _place_decode(self, run: ChoiceRun, attempt: int, prefill: Target) -> None:
        choice, request = run.plan, self._decode_request(run, attempt, prefill)
        try:
            placed, bypassed = await self._mesh.placer.decode(
                request, self._patience_s(run), lambda: run.awaits_placement(attempt)
            )
        except MeshError as error:
            run.place_failed(attempt, error)
            return
        if choice.index == 0:
            self.placement.decode_instance = placed.target.domain.instance
            self.placement.decode_terms = dict(placed.terms)
        self._mark(bypassed)
        run.decode_placed(attempt, placed, self._hold_decode(placed, request.context_tokens))

    async def _place_move(self, run: ChoiceRun, source: Leg) -> None:
        """Without waiting, and only by a router: nobody else knows who has room."""
        request = self._decode_request(run, run.attempt, source.target)
        request.needs_room = True
        request.excluded_instances.append(source.instance)
        try:
            placed, bypassed = await self._mesh.placer.decode(request, 0.0, lambda: False)
        except MeshError:
            bypassed = True
        if bypassed:
            run.move_placed(source, None, None)
            return
        if run.plan.index == 0:
            self.placement.decode_instance = placed.target.domain.instance
        run.move_placed(source, placed, self._hold_decode(placed, request.context_tokens))

    def _decode_request(self, run: ChoiceRun, attempt: int, source: Target) -> PlaceDecodeRequest:
        plan, choice = self.plan, run.plan
        return PlaceDecodeRequest(
            request_id=plan.request_id,
            choice=choice.index,
            attempt=attempt,
            gateway=self._mesh.gateway(),
            model_revision=plan.model_revision,
            tenant=plan.tenant,
            context_tokens=choice.prompt_tokens + len(run.emitted),
            max_tokens=choice.sampling.max_tokens - len(run.emitted),
            block_hashes=choice.block_hashes,
            prefill=source,
            priority=plan.priority,
            slo_tpot_s=plan.slo_tpot_s,
            excluded_instances=sorted(run.excluded),
            deadline_s=self._left_s(),
        )

    def _hold_decode(self, placed: PlaceDecodeResponse, tokens: int) -> Reservation | None:
        lease_s = placed.reservation_deadline_s
        return self._hold(placed.reservation_id, placed.target.domain, lease_s, True, tokens)

    def _hold(
        self, reservation_id: str, domain: DomainRef, lease_s: float, decode: bool, tokens: int
    ) -> Reservation | None:
        return self._mesh.reservations.hold(
            self.plan.request_id, reservation_id, domain, lease_s, decode=decode, tokens=tokens
        )

    def _mark(self, bypassed: bool) -> None:
        if bypassed:
            self.placement.degraded = "router"

    def _patience_s(self, run: ChoiceRun) -> float:
        wait_s = self._mesh.resume_wait_s if run.emitted else self._mesh.placement_wait_s
        return min(wait_s, self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self.plan.deadline - self._mesh.clock())

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        for run in self.runs:
            run.expire()

    def _raise(self, error: MeshError) -> None:
        """One failed choice ends the request: a caller cannot use a part of what it asked for."""
        if self._error is None:
            self._error = error
            for run in self.runs:
                run.cancel()
            self._notify()

    def _notify(self) -> None:
        if self.on_ready is not None:
            if not self._call_due:
                self._call_due = True
                self._loop.call_soon(self._call)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _call(self) -> None:
        self._call_due = False
        if self.on_ready is not None:
            self.on_ready()


def stalled_client_error(slow_client_s: float) -> MeshError:
    """The error of a client that does not read."""
    return MeshError(
        errors_pb2.ERROR_CODE_CANCELLED, "the client has not read its stream", limit=f"{slow_client_s:g} s"
    )
