"""The state machine of one choice without any I/O: whatever happens, it ends once and holds nothing."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1 import worker_pb2 as pb
from tidemill.mesh.v1.common_pb2 import BlockSource, DomainRef, Target
from tidemill.mesh.v1.router_pb2 import PlaceDecodeResponse, PlacePrefillResponse, Report
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.choice_run import ChoiceRun
from tidemill_gateway.flow.effects import Bounds
from tidemill_gateway.flow.plan import ChoicePlan, RequestPlan, pack_tokens
from tidemill_gateway.flow.reservations import Reservations
from tidemill_mesh.errors import MeshError

LOST = MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "gone")
MAX_TOKENS = 12
SOURCES = [BlockSource(holder=Target(endpoint="p-9:1"), num_blocks=3)]
STORES = ["kvstore-1", "kvstore-3"]


@dataclass
class World:
    """Takes the run's effects and plays the workers' and the router's part."""

    now: float = 0.0
    asked: list = field(default_factory=list)
    open_legs: list = field(default_factory=list)
    hand_overs: list = field(default_factory=list)
    moves: list = field(default_factory=list)
    stays: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    delivered: list = field(default_factory=list)
    finishes: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    credits: int = 0
    placed: int = 0
    reports: list = field(default_factory=list)

    def __post_init__(self):
        self.reservations = Reservations(lambda: self.now)
        plan = ChoicePlan(0, pack_tokens([1, 2, 3]), 3, b"", pb.Sampling(max_tokens=MAX_TOKENS))
        request = RequestPlan(
            request_id="r", tenant="t", model_revision="m", choices=(plan,), deadline=100.0, credit_tokens=8
        )
        self.run = ChoiceRun(request, plan, self, Bounds(ticket_s=3.0, stall_s=40.0), lambda: self.now)

    # effects
    def place_prefill(self, run):
        self.asked.append(("prefill", run.attempt))

    def place_decode(self, run, prefill):
        self.asked.append(("decode", run.attempt))

    def place_move(self, run, source):
        self.moves.append(source)

    def stay(self, leg):
        self.stays.append(leg)

    def open(self, leg, submit):
        assert bytes(submit.token_ids) == pack_tokens([1, 2, 3, *self.submitted(submit)])
        # Whoever may compute a prompt is told where its placement has seen blocks of it.
        has_blocks = submit.stage != pb.Submit.STAGE_DECODE
        assert (list(submit.block_sources), list(submit.stores)) == ((SOURCES, STORES) if has_blocks else ([], []))
        self.open_legs.append(leg)

    def submitted(self, submit):
        tokens = memoryview(submit.token_ids).cast("I").tolist()[submit.prompt_tokens :]
        assert tokens == self.delivered[: len(tokens)]
        return tokens

    def hand_over(self, leg, target):
        self.hand_overs.append(leg)

    def credit(self, leg, tokens):
        assert tokens > 0
        self.credits += tokens

    def close_leg(self, leg, *, abort):
        if abort:
            self.aborted.append(leg)
        if leg in self.open_legs:
            self.open_legs.remove(leg)

    def report(self, held, kind, **measured):
        self.reservations.report(held, kind, **measured)
        if held is not None:
            self.reports.append((held.reservation_id, kind))

    def deliver(self, run, token_ids, logprobs, finish):
        self.delivered.extend(token_ids)
        if finish is not None:
            self.finishes.append(finish)

    def fail(self, run, error):
        self.failures.append(error)

    # the mesh's part
    def answer_placement(self, *, whole=False):
        kind, attempt = self.asked.pop(0)
        self.placed += 1
        target = Target(domain=DomainRef(instance=f"{kind}-{self.placed}"))
        held = self.reservations.hold("r", f"res-{self.placed}", target.domain, 9.0, decode=kind == "decode", tokens=3)
        if kind == "prefill":
            placed = PlacePrefillResponse(target=target, whole=whole, sources=SOURCES, stores=STORES)
            self.run.prefill_placed(attempt, placed, held)
        else:
            self.run.decode_placed(attempt, PlaceDecodeResponse(target=target), held)

    def answer_move(self, *, room=True):
        source = self.moves.pop(0)
        if not room:
            self.run.move_placed(source, None, None)
            return
        self.placed += 1
        target = Target(domain=DomainRef(instance=f"decode-{self.placed}"))
        held = self.reservations.hold("r", f"res-{self.placed}", target.domain, 9.0, decode=True, tokens=3)
        self.run.move_placed(source, PlaceDecodeResponse(target=target), held)

    def ticket(self, *, secret=b"s"):
        leg = self.hand_overs.pop(0)
        self.run.on_ticket(leg, pb.Ticket(secret=secret))

    def output(self, leg, **fields):
        self.run.on_output(leg, pb.Output(key=leg.key, **fields))

    def emit(self, leg, position, **fields):
        self.output(leg, first_position=position, token_ids=[100 + position], **fields)


def started() -> World:
    world = World()
    world.run.start()
    world.answer_placement()
    return world


def decoding() -> World:
    world = started()
    prefill = world.open_legs[0]
    world.output(prefill, hand_over_due=True)
    world.answer_placement()
    world.ticket()
    world.emit(prefill, 0, finish=pb.FINISH_PREFILLED)
    return world


def test_a_request_goes_from_prefill_to_decode_to_its_end():
    world = decoding()
    decode = world.run.decode
    world.emit(decode, 1, hand_over_done=True)
    assert world.run.prefill.closed
    world.emit(decode, 2, finish=pb.FINISH_STOP)
    assert world.delivered == [100, 101, 102]
    assert world.finishes == [pb.FINISH_STOP]
    assert not world.open_legs
    assert not world.reservations.live
    assert [kind for _, kind in world.reports if kind == Report.KIND_DONE] == [Report.KIND_DONE] * 2


def test_tokens_of_decode_wait_for_the_first_token_of_prefill():
    world = started()
    prefill = world.open_legs[0]
    world.output(prefill, hand_over_due=True)
    world.answer_placement()
    world.ticket()
    world.emit(world.run.decode, 1)
    assert world.delivered == []
    world.emit(prefill, 0, finish=pb.FINISH_PREFILLED)
    assert world.delivered == [100, 101]


def test_the_last_token_needs_no_decode_worker():
    world = started()
    world.run.emitted.extend(range(MAX_TOKENS - 1))
    world.delivered.extend(range(MAX_TOKENS - 1))
    world.run._started_with = MAX_TOKENS - 1
    world.output(world.open_legs[0], hand_over_due=True)
    assert world.asked == []


def test_a_first_token_that_ends_the_request_drops_the_decode_placement():
    world = started()
    world.output(world.open_legs[0], hand_over_due=True)
    world.emit(world.open_legs[0], 0, finish=pb.FINISH_STOP)
    world.answer_placement()
    assert world.finishes == [pb.FINISH_STOP]
    assert not world.reservations.live


def test_a_lost_prefill_worker_does_not_stop_a_decode_that_has_its_submit():
    world = decoding()
    world.run.on_lost(world.run.prefill, LOST)
    assert world.asked == []
    world.emit(world.run.decode, 1, finish=pb.FINISH_LENGTH)
    assert world.finishes == [pb.FINISH_LENGTH]
    assert (("res-1", Report.KIND_FAILED)) in world.reports


def test_a_lost_decode_worker_starts_a_new_attempt_that_excludes_it():
    world = decoding()
    world.emit(world.run.decode, 1, hand_over_done=True)
    lost = world.run.decode
    world.run.on_lost(lost, LOST)
    assert world.asked == [("prefill", 2)]
    assert world.run.excluded == {lost.instance}


def test_an_output_that_no_instance_has_room_for_is_named_as_the_first_one_named_it():
    world = decoding()
    world.emit(world.run.decode, 1, hand_over_done=True)
    full = MeshError(
        errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "outgrown", field="sampling.max_tokens", limit="5 tokens"
    )
    world.output(world.run.decode, error=full.to_detail())
    assert world.asked == [("prefill", 2)], "another instance may have more room"
    too_long = MeshError(errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "prompt and output together", field="prompt_tokens")
    world.run.place_failed(2, too_long)
    [error] = world.failures
    assert (error.code, error.field, error.limit) == (full.code, full.field, full.limit)


def test_a_prompt_that_no_instance_has_room_for_is_named_as_such():
    world = World()
    world.run.start()
    world.run.place_failed(1, MeshError(errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, "", field="prompt_tokens"))
    assert [error.field for error in world.failures] == ["prompt_tokens"]


@pytest.mark.parametrize("end", ["cancel", "expire", "stop"])
def test_both_legs_are_told_at_once_when_a_client_leaves_or_its_time_is_over(end):
    world = decoding()
    legs = [world.run.prefill, world.run.decode]
    getattr(world.run, end)()
    assert world.aborted == legs
    moved, source = moving()
    legs = [source, moved.run.decode]
    getattr(moved.run, end)()
    assert moved.aborted == legs


def test_outputs_of_an_older_attempt_are_dropped():
    world = decoding()
    old = world.run.decode
    world.run.on_lost(old, LOST)
    world.emit(old, 1)
    assert world.delivered == [100]


def test_a_gap_in_positions_is_another_attempt_not_a_splice():
    world = decoding()
    world.emit(world.run.decode, 2)
    assert world.delivered == [100]
    assert not world.failures
    assert (world.run.attempt, world.asked[-1]) == (2, ("prefill", 2))


def test_a_repeated_position_is_an_error_not_a_splice():
    world = decoding()
    world.emit(world.run.decode, 0)
    assert world.failures[0].code == errors_pb2.ERROR_CODE_INTERNAL
    assert world.delivered == [100]


def test_a_stage_that_its_worker_has_lost_is_tried_again():
    world = decoding()
    lost = world.run.decode
    world.run.on_forgotten(lost, LOST)
    assert (world.run.attempt, world.asked[-1]) == (2, ("prefill", 2))
    world.run.on_forgotten(lost, LOST)
    assert world.run.attempt == 2


def test_kv_that_waits_in_prefill_is_no_lost_stage():
    world = World()
    world.run.start()
    world.answer_placement()
    prefill = world.run.prefill
    world.emit(prefill, 0, finish=pb.FINISH_PREFILLED)
    world.run.on_forgotten(prefill, LOST)
    assert world.run.attempt == 1


def test_no_ticket_within_its_bound_is_a_failure():
    world = started()
    world.output(world.open_legs[0], hand_over_due=True)
    world.answer_placement()
    world.run.check_progress(world.now + 4.0, lambda leg: 0.0)
    assert world.asked == [("prefill", 2)]


def test_a_silent_leg_is_given_up_unless_its_domain_or_the_client_is_the_reason():
    world = decoding()
    world.emit(world.run.decode, 1, hand_over_done=True)
    world.run.check_progress(50.0, lambda leg: 49.0)
    assert world.asked == []
    world.run.check_progress(50.0, lambda leg: 0.0)
    assert world.asked == [("prefill", 2)]
    stalled = decoding()
    for position in range(1, 8):
        stalled.emit(stalled.run.decode, position, hand_over_done=position == 1)
    stalled.run.check_progress(50.0, lambda leg: 0.0)
    assert stalled.asked == []


def test_credit_follows_what_the_client_takes():
    world = decoding()
    for position in range(1, 5):
        world.emit(world.run.decode, position)
    assert world.credits == 0
    world.run.consumed(3)
    world.run.consumed(2)
    assert world.credits == 5


def moving() -> tuple[World, object]:
    """Three tokens are out, and another worker has been given the ticket."""
    world = decoding()
    source = world.run.decode
    world.emit(source, 1, hand_over_done=True)
    world.output(source, move_due=True)
    world.emit(source, 2)
    world.answer_move()
    world.ticket()
    return world, source


def test_a_running_request_goes_on_at_another_worker_with_the_next_token():
    world, source = moving()
    other = world.run.decode
    assert other is not source
    assert other.stage == pb.Submit.STAGE_DECODE
    world.emit(other, 3, hand_over_done=True)
    assert source.closed
    world.emit(other, 4, finish=pb.FINISH_STOP)
    assert world.delivered == [100, 101, 102, 103, 104]
    assert not world.open_legs
    assert not world.reservations.live
    assert world.run.attempt == 1


def test_without_room_elsewhere_it_stays_and_may_be_offered_again():
    world = decoding()
    source = world.run.decode
    world.emit(source, 1, hand_over_done=True)
    for round in range(1, 3):
        world.output(source, move_due=True)
        world.answer_move(room=False)
        assert world.stays == [source] * round
    world.output(source, move_due=True)
    world.answer_move()
    world.ticket(secret=b"")
    assert world.run.decode is source
    world.emit(source, 2, finish=pb.FINISH_STOP)
    assert world.finishes == [pb.FINISH_STOP]
    assert not world.reservations.live


def test_one_that_is_still_being_handed_over_stays():
    world = decoding()
    world.output(world.run.decode, move_due=True)
    assert not world.moves
    assert world.stays == [world.run.decode]


@pytest.mark.parametrize("how", ["lost", "error"])
def test_when_the_other_worker_fails_it_goes_on_where_it_was(how):
    world, source = moving()
    other = world.run.decode
    if how == "lost":
        world.open_legs.remove(other)
        world.run.on_lost(other, LOST)
    else:
        world.output(other, finish=pb.FINISH_ERROR, error=LOST.to_detail())
    assert world.stays == [source]
    assert (world.run.attempt, world.run.decode) == (1, source)
    world.emit(source, 3, finish=pb.FINISH_LENGTH)
    assert world.delivered == [100, 101, 102, 103]
    assert not world.reservations.live


def test_where_it_goes_on_it_has_the_credit_that_the_other_was_given_meanwhile():
    """A slow reader takes all that there is while the other worker fails: nothing more would be taken, or sent."""
    world, source = moving()
    assert source.may_resume
    other, window = world.run.decode, world.run.request.credit_tokens
    world.run.consumed(5)
    assert (other.out_of_credit_at, source.out_of_credit_at) == (window + 5, window)
    world.output(other, finish=pb.FINISH_ERROR, error=LOST.to_detail())
    assert source.out_of_credit_at == window + 5
    assert world.credits == 10
    assert not source.may_resume


def test_a_worker_that_has_nothing_left_to_go_on_with_costs_an_attempt():
    world, source = moving()
    world.output(world.run.decode, finish=pb.FINISH_ERROR, error=LOST.to_detail())
    gone = MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "not here")
    world.output(source, finish=pb.FINISH_ERROR, error=gone.to_detail())
    assert world.asked == [("prefill", 2)]


def test_a_worker_that_nobody_fetched_from_goes_on_and_the_other_is_dropped():
    world, source = moving()
    other = world.run.decode
    world.emit(source, 3)
    assert world.run.decode is source
    assert other.closed
    assert world.open_legs == [source]


def test_a_worker_lost_while_it_is_fetched_from_leaves_it_to_the_other():
    world, source = moving()
    world.open_legs.remove(source)
    world.run.on_lost(source, LOST)
    world.emit(world.run.decode, 3, finish=pb.FINISH_STOP)
    assert world.finishes == [pb.FINISH_STOP]


def test_a_ticket_that_does_not_come_ends_the_move_not_the_request():
    world = decoding()
    source = world.run.decode
    world.emit(source, 1, hand_over_done=True)
    world.output(source, move_due=True)
    world.answer_move()
    world.run.check_progress(world.now + 4.0, lambda leg: world.now + 4.0)
    assert world.stays == [source]
    assert world.asked == []
    world.ticket()
    assert world.run.decode is source


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["place", "place_whole", "ticket", "token", "due", "prefilled", "done", "stop", "length", "error", "lost",
             "progress", "refused", "move", "moved", "no_room", "no_ticket"]
        ),
        st.integers(0, 3),
    ),
    max_size=60,
)  # fmt: skip


def act(world: World, action: str, which: int) -> None:
    world.now += 0.1
    leg = world.open_legs[which % len(world.open_legs)] if world.open_legs else None
    if action in ("place", "place_whole"):
        if world.asked:
            world.answer_placement(whole=action == "place_whole")
    elif action == "ticket":
        if world.hand_overs:
            world.ticket()
    elif action in ("moved", "no_room"):
        if world.moves:
            world.answer_move(room=action == "moved")
    elif action == "no_ticket":
        if world.hand_overs:
            world.ticket(secret=b"")
    elif action == "progress":
        world.run.check_progress(world.now + 30.0 * which, lambda leg: 0.0)
    elif action == "refused":
        world.run.place_failed(world.run.attempt, MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "none"))
    elif leg is not None:
        position = len(world.delivered)
        early = leg.stage == pb.Submit.STAGE_DECODE and not world.run.prefill.prefilled
        position += early
        reactions = {
            "token": lambda: world.emit(leg, position),
            "move": lambda: world.output(leg, move_due=True),
            "due": lambda: world.output(leg, hand_over_due=True),
            "prefilled": lambda: world.emit(leg, position, finish=pb.FINISH_PREFILLED),
            "done": lambda: world.emit(leg, position, hand_over_done=True),
            "stop": lambda: world.emit(leg, position, finish=pb.FINISH_STOP),
            "length": lambda: world.emit(leg, position, finish=pb.FINISH_LENGTH),
            "error": lambda: world.output(leg, finish=pb.FINISH_ERROR, error=LOST.to_detail()),
            "lost": lambda: (world.open_legs.remove(leg), world.run.on_lost(leg, LOST)),
        }
        reactions[action]()


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.sampled_from(["cancel", "expire", "stop"]))
def test_whatever_happens_it_ends_once_and_holds_nothing(actions, end):
    world = World()
    world.run.start()
    for action, which in actions:
        act(world, action, which)
        if world.failures and world.failures[-1].code == errors_pb2.ERROR_CODE_INTERNAL:
            assert world.run.done
    getattr(world.run, end)()
    while world.asked:
        world.answer_placement()
    while world.moves:
        world.answer_move()
    assert world.run.done
    assert not world.open_legs
    assert not world.reservations.live
    assert len(world.finishes) + len(world.failures) <= 1
    assert world.delivered == [100 + i for i in range(len(world.delivered))]
    assert world.run.attempt <= world.run.request.max_attempts
    ends = {Report.KIND_DONE, Report.KIND_FAILED, Report.KIND_CANCELLED}
    for number in range(1, world.placed + 1):
        kinds = [report.kind for report in world.reservations.queue if report.reservation_id == f"res-{number}"]
        assert sum(kind in ends for kind in kinds) == 1
        assert kinds[-1] in ends
