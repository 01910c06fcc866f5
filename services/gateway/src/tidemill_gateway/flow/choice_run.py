"""One choice from its first placement to its end, through all attempts: a state machine without I/O.

    place P -> submit PREFILL -> first token -> hand over due -> place D -> ticket -> submit DECODE -> tokens -> end
            -> submit WHOLE (on a decode instance)                                                  -> tokens -> end
       tokens -> move due -> place another D -> ticket of this one -> submit DECODE there -> tokens -> end

Whatever is lost on the way starts a new attempt with prompt + emitted tokens. A token reaches the client only at the
position that follows the last one, so nothing is lost, repeated or spliced.
"""

from collections.abc import Callable

from tidemill.mesh.v1 import worker_pb2
from tidemill.mesh.v1.common_pb2 import Target, TierTokens
from tidemill.mesh.v1.router_pb2 import PlaceDecodeResponse, PlacePrefillResponse, Report
from tidemill.mesh.v1.worker_pb2 import HandOverSource, Output, RequestKey, Submit, Ticket
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.effects import Bounds, Effects
from tidemill_gateway.flow.leg import Leg
from tidemill_gateway.flow.plan import ChoicePlan, RequestPlan, pack_tokens
from tidemill_gateway.flow.reservations import Reservation
from tidemill_mesh.errors import MeshError

RETRYABLE = frozenset(
    {
        errors_pb2.ERROR_CODE_WORKER_LOST,
        errors_pb2.ERROR_CODE_STALE,
        errors_pb2.ERROR_CODE_UNAVAILABLE,
        errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
        errors_pb2.ERROR_CODE_NOT_FOUND,
    }
)
UNBOUNDED_CREDIT = 1 << 30


class ChoiceRun:
    """Reacts to placements, outputs, tickets and losses; ends exactly once."""

    def __init__(
        self, request: RequestPlan, plan: ChoicePlan, effects: Effects, bounds: Bounds, clock: Callable[[], float]
    ) -> None:
        self.request = request
        self.plan = plan
        self.attempt = 0
        self.emitted: list[int] = []
        self.excluded: set[str] = set()
        self.prefill: Leg | None = None
        self.decode: Leg | None = None
        self.done = False
        self.cached = TierTokens()
        self.queue_s = 0.0
        self.first_token_at = 0.0
        self._effects = effects
        self._bounds = bounds
        self._clock = clock
        self._started_with = 0
        self._decode_wanted = False
        self._decode_target: Target | None = None
        self._decode_held: Reservation | None = None
        self._moving: Leg | None = None
        """The decode leg that is to go on elsewhere, until its KV has arrived there or it goes on where it is."""
        self._early: list[Output] = []
        self._delivered_credit = 0
        self._outgrown: MeshError | None = None
        """What the instance said that had no more room for the output of an earlier attempt."""

    # --- what happens ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins the first attempt."""
        self._begin_attempt()

    def prefill_placed(self, attempt: int, placed: PlacePrefillResponse, held: Reservation | None) -> None:
        """Answers Effects.place_prefill."""
        if not self.awaits_placement(attempt):
            self._effects.report(held, Report.KIND_CANCELLED)
            return
        stage = Submit.STAGE_WHOLE if placed.whole else Submit.STAGE_PREFILL
        leg = self._leg(stage, placed.target, held)
        if placed.whole:
            self.decode = leg
        else:
            self.prefill = leg
        submit = self._submit(leg)
        submit.block_sources.extend(placed.sources)
        submit.stores.extend(placed.stores)
        self._effects.open(leg, submit)

    def decode_placed(self, attempt: int, placed: PlaceDecodeResponse, held: Reservation | None) -> None:
        """Answers Effects.place_decode."""
        if not self.awaits_placement(attempt) or self.prefill is None:
            self._effects.report(held, Report.KIND_CANCELLED)
            return
        self._decode_target, self._decode_held = placed.target, held
        self._hand_over(self.prefill)

    def move_placed(self, leg: Leg, placed: PlaceDecodeResponse | None, held: Reservation | None) -> None:
        """Answers Effects.place_move; None: there is no room elsewhere."""
        if self.done or leg.closed or leg is not self._moving:
            self._effects.report(held, Report.KIND_CANCELLED)
        elif placed is None:
            self._stay()
        else:
            self._decode_target, self._decode_held = placed.target, held
            self._hand_over(leg)

    def place_failed(self, attempt: int, error: MeshError) -> None:
        """No place was found within the bound: retrying is over."""
        if self.awaits_placement(attempt):
            self._fail(error)

    def awaits_placement(self, attempt: int) -> bool:
        """Whether an answer for this attempt is still wanted."""
        return not self.done and attempt == self.attempt

    def on_ticket(self, leg: Leg, ticket: Ticket) -> None:
        """P, or a decode worker that the request leaves, is ready to send: D may fetch."""
        if self.done or leg.closed or self._decode_target is None:
            return
        if leg is self._moving and leg is self.decode:
            if not ticket.secret:
                self._stay(tell=False)
                return
            # What it was to D, this leg now is to the next one: all but its last token is computed there.
            self.prefill, self.decode = leg, None
            leg.prefilled = leg.may_resume = True
            self._started_with = len(self.emitted) - 1
        if leg is not self.prefill or self.decode is not None:
            return
        leg.hand_over_at = None
        self.decode = self._leg(Submit.STAGE_DECODE, self._decode_target, self._decode_held)
        self._decode_held = None
        submit = self._submit(self.decode)
        submit.source.CopyFrom(HandOverSource(prefill=leg.target, ticket=ticket))
        self._effects.open(self.decode, submit)

    def on_output(self, leg: Leg, output: Output) -> None:
        """A step's result for one of the legs."""
        if self.done or leg.closed:
            return
        leg.progress_at = self._clock()
        if output.HasField("error"):
            self._leg_failed(leg, MeshError.from_detail(output.error))
            return
        if leg is self.decode and self.prefill is not None and not self.prefill.prefilled:
            # D's stream may be ahead of P's, which still carries the first token.
            self._early.append(output)
            return
        self._take(leg, output)

    def on_lost(self, leg: Leg, error: MeshError) -> None:
        """The worker, or the stream to it, is gone."""
        if not (self.done or leg.closed):
            self._leg_failed(leg, error, lost=True)

    def on_forgotten(self, leg: Leg, error: MeshError) -> None:
        """The worker lives but will tell no more: it has lost the stage, or its last output was lost on the way."""
        waits_for_prefill = leg is self.decode and any(output.finish for output in self._early)
        if not (self.done or leg.closed or leg.prefilled or waits_for_prefill):
            self._leg_failed(leg, error)

    def on_fault(self, leg: Leg, error: MeshError) -> None:
        """A fault of this gateway: the choice ends, in whatever state the fault has left its legs."""
        if not self.done:
            self._fail(error)

    def stop(self) -> None:
        """The text is complete (a stop string, a tool call): the rest is not wanted."""
        if not self.done:
            self._end(Report.KIND_DONE)

    def cancel(self) -> None:
        """The caller is gone."""
        if not self.done:
            self._end(Report.KIND_CANCELLED)

    def expire(self) -> None:
        """The deadline has passed."""
        if not self.done:
            self._fail(MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "the request's deadline has passed"))

    def consumed(self, tokens: int) -> None:
        """The client has taken tokens: the worker may go on."""
        window = self.request.credit_tokens
        if self.done or window == 0:
            return
        self._delivered_credit += tokens
        leg = self.decode or self.prefill
        if leg is not None and not leg.closed and self._lacks_credit(leg) >= window / 2:
            self._credit(leg)

    def check_progress(self, now: float, domain_progress_at: Callable[[Leg], float]) -> None:
        """Gives up on a leg that is silent beyond its bound, though its stream lives."""
        leg = self._moving
        if leg and leg.hand_over_at is not None and now - leg.hand_over_at > self._bounds.ticket_s:
            self._stay()
        leg = self.prefill
        if leg and leg.hand_over_at is not None and now - leg.hand_over_at > self._bounds.ticket_s:
            self._leg_failed(leg, _lost(leg, f"no ticket within {self._bounds.ticket_s:g} s"))
            return
        for leg in (self.prefill, self.decode):
            if leg is None or leg.closed or leg.prefilled or self.done or self._waits_for_client(leg):
                continue
            silent_s = now - max(leg.progress_at, domain_progress_at(leg))
            if silent_s > self._bounds.stall_s:
                self._leg_failed(leg, _lost(leg, f"no progress for {silent_s:.1f} s"))
                return

    # --- reactions ---------------------------------------------------------------------------------------------------

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self._started_with = len(self.emitted)
        self._decode_wanted = False
        self._moving = None
        self._early.clear()
        self._effects.place_prefill(self)

    def _leg(self, stage: "Submit.Stage.ValueType", target: Target, held: Reservation | None) -> Leg:
        key = RequestKey(request_id=self.request.request_id, choice=self.plan.index, attempt=self.attempt)
        now = self._clock()
        return Leg(self, key, stage, target, held, now, now)

    def _submit(self, leg: Leg) -> Submit:
        request = self.request
        earlier = self.emitted[: self._started_with]
        credit = UNBOUNDED_CREDIT
        if request.credit_tokens:
            leg.out_of_credit_at = self._delivered_credit + request.credit_tokens
            credit = max(1, leg.out_of_credit_at - len(self.emitted))
        return Submit(
            key=leg.key,
            domain=leg.target.domain.domain,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            traceparent=request.traceparent,
            deadline_s=max(0.001, request.deadline - self._clock()),
            priority=request.priority,
            model_revision=request.model_revision,
            token_ids=self.plan.prompt + pack_tokens(earlier) if earlier else self.plan.prompt,
            prompt_tokens=self.plan.prompt_tokens,
            sampling=self.plan.sampling,
            stage=leg.stage,
            credit_tokens=credit,
            reservation_id=leg.reservation.reservation_id if leg.reservation else "",
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
            program_id=request.program_id,
        )

    def _take(self, leg: Leg, output: Output) -> None:
        if output.HasField("cached") and self.attempt == 1 and leg is not self._second_leg():
            self.cached = output.cached
            self.queue_s = output.queue_s
        if output.token_ids and output.first_position > len(self.emitted):
            # An output was lost. What the client has is right: another attempt goes on from there.
            self._leg_failed(leg, _lost(leg, self._out_of_order(output)))
            return
        if output.token_ids and output.first_position < len(self.emitted):
            message = f"instance {leg.instance} {self._out_of_order(output)}"
            self._fail(MeshError(errors_pb2.ERROR_CODE_INTERNAL, message))
            return
        if leg is self._moving and leg is self.prefill and (output.token_ids or output.finish):
            # Nobody fetched it in time, so it goes on there.
            self._take_back()
        ended = output.finish in (worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH)
        if output.token_ids or ended:
            self._emit(output, ended)
        if output.hand_over_done:
            self._release_prefill()
        if ended:
            self._complete(leg)
        elif output.finish == worker_pb2.FINISH_PREFILLED:
            self._prefilled(leg)
        elif output.finish:
            self._leg_failed(leg, _lost(leg, f"ended with {worker_pb2.Finish.Name(output.finish)}"))
        elif output.hand_over_due:
            self._want_decode(leg)
        elif output.move_due:
            self._want_move(leg)

    def _emit(self, output: Output, ended: bool) -> None:
        if not self.first_token_at:
            self.first_token_at = self._clock()
        self.emitted.extend(output.token_ids)
        self._effects.deliver(self, output.token_ids, output.logprobs, output.finish if ended else None)

    def _second_leg(self) -> Leg | None:
        return self.decode if self.prefill is not None else None

    def _out_of_order(self, output: Output) -> str:
        return f"sent position {output.first_position} where {len(self.emitted)} was due"

    def _want_decode(self, leg: Leg) -> None:
        one_left = self._started_with + 1 >= self.plan.sampling.max_tokens
        if leg is self.prefill and not self._decode_wanted and not (one_left and not leg.prefilled):
            self._decode_wanted = True
            self._effects.place_decode(self, leg)

    def _hand_over(self, leg: Leg) -> None:
        assert self._decode_target is not None, "a place was found"
        leg.hand_over_at = self._clock()
        self._effects.hand_over(leg, self._decode_target)

    def _want_move(self, leg: Leg) -> None:
        """A worker needs the room. What is still under way from prefill to it comes first."""
        if leg is not self.decode or self._moving is not None or (self.prefill and not self.prefill.closed):
            self._effects.stay(leg)
            return
        self._moving = leg
        self._effects.place_move(self, leg)

    def _stay(self, *, tell: bool = True) -> None:
        """The move is off before the other worker has heard of it."""
        leg, self._moving = self._moving, None
        assert leg is not None, "a move is under way"
        self._effects.report(self._decode_held, Report.KIND_CANCELLED)
        self._decode_target = self._decode_held = leg.hand_over_at = None
        if tell:
            self._effects.stay(leg)

    def _take_back(self) -> None:
        """The other worker has not taken over: the leg that was to move goes on where it is."""
        leg, other = self._moving, self.decode
        assert leg is not None, "a move is under way"
        if other is not None and not other.closed:
            self._close(other, Report.KIND_CANCELLED, abort=True)
        self.prefill, self.decode, self._moving = None, leg, None
        self._decode_target = None
        leg.prefilled = leg.may_resume = False
        leg.progress_at = self._clock()
        # What the client has taken meanwhile was credited to the other.
        self._credit(leg)

    def _prefilled(self, leg: Leg) -> None:
        leg.prefilled = True
        self._effects.report(leg.reservation, Report.KIND_PREFILLED, measured_s=self._clock() - leg.opened_at)
        self._want_decode(leg)
        early, self._early = self._early, []
        for output in early:
            if self.decode is not None and not self.done:
                self._take(self.decode, output)

    def _lacks_credit(self, leg: Leg) -> int:
        """Tokens that the leg may be ahead of the client beyond what it knows of."""
        return self._delivered_credit + self.request.credit_tokens - leg.out_of_credit_at

    def _credit(self, leg: Leg) -> None:
        lacking = self._lacks_credit(leg)
        if self.request.credit_tokens and lacking > 0:
            self._effects.credit(leg, lacking)
            leg.out_of_credit_at += lacking

    def _release_prefill(self) -> None:
        """KV has arrived at D: P, or the worker that the request has left, holds nothing for it any more."""
        if self.prefill is not None and not self.prefill.closed:
            self._close(self.prefill, Report.KIND_DONE, abort=self.prefill is self._moving)
        self._moving = None

    def _leg_failed(self, leg: Leg, error: MeshError, *, lost: bool = False) -> None:
        gone = lost or (error.code == errors_pb2.ERROR_CODE_WORKER_LOST and leg is not self._second_leg())
        self._effects.report(leg.reservation, Report.KIND_FAILED, instance_lost=gone)
        leg.closed = True
        self._effects.close_leg(leg, abort=not lost)
        self.excluded.add(leg.instance)
        if error.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED and self.emitted:
            self._outgrown = error
        source = self.prefill
        if leg is self.decode and source is not None and source is self._moving and not source.closed:
            self._take_back()
            self._effects.stay(source)
            return
        if leg is self._second_leg() and self.prefill is not None and not self.prefill.closed:
            # The hand-over was not done: which side failed is not known.
            self.excluded.add(self.prefill.instance)
        if leg is self.prefill and leg.prefilled and self.decode is not None and not self.decode.closed:
            # D has all it needs, or will say that it has not.
            return
        if error.code not in RETRYABLE or self.attempt >= self.request.max_attempts:
            self._fail(error)
            return
        self._close_legs(Report.KIND_CANCELLED)
        self._begin_attempt()

    def _complete(self, leg: Leg) -> None:
        leg.closed = True
        now = self._clock()
        tokens = len(self.emitted) - self._started_with
        measured_s = now - leg.opened_at if leg is self.prefill else (now - leg.opened_at) / max(1, tokens)
        self._effects.report(leg.reservation, Report.KIND_DONE, measured_s=measured_s, output_tokens=tokens)
        self._effects.close_leg(leg, abort=False)
        self._end(Report.KIND_DONE)

    def _fail(self, error: MeshError) -> None:
        if error.code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG and self._outgrown is not None:
            # Nobody has room for prompt and output together, but the prompt did fit.
            error = self._outgrown
        self._end(Report.KIND_CANCELLED)
        self._effects.fail(self, error)

    def _end(self, kind: "Report.Kind.ValueType") -> None:
        self.done = True
        self._close_legs(kind)

    def _close_legs(self, kind: "Report.Kind.ValueType") -> None:
        for leg in (self.prefill, self.decode):
            if leg is not None and not leg.closed:
                self._close(leg, kind, abort=True)
        self._effects.report(self._decode_held, Report.KIND_CANCELLED)
        self.prefill = self.decode = self._moving = self._decode_target = self._decode_held = None

    def _close(self, leg: Leg, kind: "Report.Kind.ValueType", *, abort: bool) -> None:
        leg.closed = True
        self._effects.report(leg.reservation, kind)
        self._effects.close_leg(leg, abort=abort)

    def _waits_for_client(self, leg: Leg) -> bool:
        return bool(self.request.credit_tokens) and len(self.emitted) >= leg.out_of_credit_at


def _lost(leg: Leg, reason: str) -> MeshError:
    return MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"instance {leg.instance}: {reason}")
