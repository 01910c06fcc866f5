"""The state machine of one choice without any I/O: whatever happens, it ends once and holds nothing."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1 import worker_pb2 as pb
from tidemill.mesh.v1.common_pb2 import DomainRef, Target
from tidemill.mesh.v1.router_pb2 import PlaceDecodeResponse, PlacePrefillResponse, Report
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.choice_run import ChoiceRun
from tidemill_gateway.flow.effects import Bounds
from tidemill_gateway.flow.plan import ChoicePlan, RequestPlan, pack_tokens
from tidemill_gateway.flow.reservations import Reservations
from tidemill_mesh.errors import MeshError

LOST = MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "gone")
MAX_TOKENS = 12


@dataclass
class World:
    """Takes the run's effects and plays the workers' and the router's part."""

    now: float = 0.0
    asked: list = field(default_factory=list)
    open_legs: list = field(default_factory=list)
    hand_overs: list = field(default_factory=list)
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

    def open(self, leg, submit):
        assert bytes(submit.token_ids) == pack_tokens([1, 2, 3, *self.submitted(submit)])
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
            self.run.prefill_placed(attempt, PlacePrefillResponse(target=target, whole=whole), held)
        else:
            self.run.decode_placed(attempt, PlaceDecodeResponse(target=target), held)

    def ticket(self):
        leg = self.hand_overs.pop(0)
        self.run.on_ticket(leg, pb.Ticket(secret=b"s"))

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


def test_outputs_of_an_older_attempt_are_dropped():
    world = decoding()
    old = world.run.decode
    world.run.on_lost(old, LOST)
    world.emit(old, 1)
    assert world.delivered == [100]


def test_a_gap_in_positions_is_an_error_not_a_splice():
    world = decoding()
    world.emit(world.run.decode, 2)
    assert world.failures[0].code == errors_pb2.ERROR_CODE_INTERNAL
    assert world.delivered == [100]


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


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["place", "place_whole", "ticket", "token", "due", "prefilled", "done", "stop", "length", "error", "lost",
             "progress", "refused"]
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
