"""Several routers know of each other's placements, whatever the bus does, and do not all choose the same target."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, DomainRecord, MembershipRecord, ModelRef
from tidemill.mesh.v1.router_pb2 import PlacePrefillRequest, ReservationBatch
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import BlockIndex
from tidemill_mesh.load import LoadSample
from tidemill_router.candidate import Costs, ModelFacts
from tidemill_router.fences import Fences
from tidemill_router.replica_log import ReplicaLog
from tidemill_router.replicas import Replicas
from tidemill_router.report_times import ReportTimes
from tidemill_router.reservations import DECODE, PREFILL, SOFT, Reservations
from tidemill_router.router import Router
from tidemill_router.turnover import Turnover
from tidemill_router.view import MeshView

GATEWAY = ("g-0", "gi")
TARGETS = [DomainRef(instance=f"p-{i}", incarnation="pi", domain=0, epoch="e") for i in range(2)]
HASHES = hash_blocks(chain_root(b"m", b""), range(4), 1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """The reservations of one router and what it knows of the other."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock, self.starts = name, clock, 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        prefix = f"{self.name}{self.starts}"
        self.reservations = Reservations(prefix, 9.0, self.clock, Turnover(300.0, self.clock))
        self.log = ReplicaLog(lambda: InstanceRef(instance=self.name, incarnation=f"i{self.starts}"), self.clock)
        self.reservations.observer = self.log
        self.replicas = Replicas(self.reservations, self.log, self.clock)

    def meet(self, other: "Peer") -> None:
        self.replicas.register(other.name, f"i{other.starts}")

    def fetch(self, other: "Peer") -> None:
        for instance in self.replicas.due():
            self.replicas.begin(instance)
            self.replicas.complete(other.log.snapshot(other.reservations.of_origin("")))

    def live(self) -> dict[str, tuple[str, str, int]]:
        return {
            r.id: (r.kind, r.domain.instance, r.prefill_tokens)
            for origin in ("", "a", "b")
            for r in self.reservations.of_origin(origin)
        }


def exchange(left: Peer, right: Peer) -> None:
    for sender, receiver in ((left, right), (right, left)):
        for batch in sender.log.batches():
            receiver.replicas.receive(batch)


def pair() -> tuple[Clock, Peer, Peer]:
    clock = Clock()
    left, right = Peer("a", clock), Peer("b", clock)
    for one, other in ((left, right), (right, left)):
        one.meet(other)
        one.fetch(other)
    return clock, left, right


def test_a_placement_of_one_router_is_load_and_a_pending_prefix_for_the_other() -> None:
    clock, left, right = pair()
    made = left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=500, hashes=HASHES)
    exchange(left, right)
    holder = ("p-0", 0)
    assert right.reservations.claims(holder, clock.now) == left.reservations.claims(holder, clock.now)
    assert right.reservations.pending.depth(holder, HASHES) == 4
    left.reservations.prefilled(made.id)
    exchange(left, right)
    assert right.reservations.claims(holder, clock.now).prefill_tokens == 0
    assert len(right.reservations.pending) == 0
    left.reservations.end(made.id, "done")
    exchange(left, right)
    assert len(right.reservations) == 0
    assert right.log.batches() == [], "what a replica told is not told again"


def test_a_router_alone_tells_nothing_and_one_that_joins_learns_all() -> None:
    clock = Clock()
    left, right = Peer("a", clock), Peer("b", clock)
    kept = left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=500, hashes=HASHES)
    left.reservations.end(left.reservations.reserve(PREFILL, GATEWAY, TARGETS[1], prefill_tokens=9).id, "done")
    assert left.log.batches() == []
    right.meet(left)
    right.fetch(left)
    assert right.live().keys() == {kept.id}
    # The other one does not know of it yet: a heartbeat tells that something was missed.
    later = left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=7)
    clock.now += 1
    exchange(left, right)
    right.fetch(left)
    assert right.live().keys() == {kept.id, later.id}
    left.meet(right)
    left.reservations.end(kept.id, "done")
    exchange(left, right)
    assert right.live() == left.live() == {later.id: (PREFILL, "p-0", 7)}


def test_a_gateway_that_changes_routers_ends_its_reservations_at_both() -> None:
    _, left, right = pair()
    prefill = left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=500, request=("q", 0))
    left.reservations.claim_decode(prefill, TARGETS[1], blocks=3)
    exchange(left, right)
    assert right.reservations.count_by_kind()[SOFT] == 1
    right.reservations.settle_decode(("q", 0))
    assert right.reservations.end(prefill.id, "done")
    for _ in range(3):
        exchange(right, left)
    assert len(left.reservations) == len(right.reservations) == 0
    assert left.log.batches() == right.log.batches() == [], "nothing is told back and forth"


def test_an_end_that_overtakes_its_beginning_does_not_leave_a_reservation() -> None:
    clock, left, right = pair()
    made = left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=500)
    clock.now += 1
    right.replicas.register("a", "other")
    right.meet(left)
    right.fetch(left)
    assert right.reservations.end(made.id, "done")
    for _ in range(3):
        exchange(left, right)
    assert len(left.reservations) == len(right.reservations) == 0


def test_a_router_that_goes_leaves_its_reservations_until_their_deadline() -> None:
    clock, left, right = pair()
    kept = left.reservations.reserve(DECODE, GATEWAY, TARGETS[0], blocks=3)
    left.reservations.reserve(DECODE, GATEWAY, TARGETS[0], blocks=3)
    exchange(left, right)
    right.replicas.forget("a")
    clock.now += 5
    assert right.reservations.renew(kept.id)
    clock.now += 5
    right.reservations.expire()
    assert [r.id for r in right.reservations.of_origin("")] == [kept.id]


def test_a_router_that_starts_anew_learns_what_the_other_has_placed() -> None:
    clock, left, right = pair()
    left.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], prefill_tokens=500)
    exchange(left, right)
    right.start()
    right.meet(left)
    right.fetch(left)
    assert right.live() == left.live()
    clock.now += 20
    for batch in left.log.batches():
        right.replicas.receive(batch)
    assert len(right.reservations) == 1, "a heartbeat renews what the other answers for"


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve", "reserve", "soft", "prefilled", "end", "send", "drop", "repeat", "fetch", "restart"]
        ),
        st.integers(0, 1),
        st.integers(0, 9),
    ),
    min_size=15,
    max_size=60,
)


@given(actions=actions)
@settings(max_examples=150, deadline=None)
def test_after_quiet_both_routers_know_the_same_reservations(actions: list[tuple[str, int, int]]) -> None:
    clock, *both = pair()
    last: ReservationBatch | None = None
    for kind, side, number in actions:
        peer, other = both[side], both[1 - side]
        any_of_both = [*peer.reservations.of_origin(""), *peer.reservations.of_origin(other.name)]
        if kind == "reserve":
            peer.reservations.reserve(PREFILL, GATEWAY, TARGETS[number % 2], prefill_tokens=number, hashes=HASHES)
        elif kind == "soft":
            made = peer.reservations.reserve(PREFILL, GATEWAY, TARGETS[0], request=(f"q{number}", 0))
            peer.reservations.claim_decode(made, TARGETS[1], blocks=number)
        elif kind == "prefilled" and any_of_both:
            peer.reservations.prefilled(any_of_both[number % len(any_of_both)].id)
        elif kind == "end" and any_of_both:
            peer.reservations.end(any_of_both[number % len(any_of_both)].id, "done")
        elif kind in ("send", "drop"):
            for last in peer.log.batches():
                if kind == "send":
                    other.replicas.receive(last)
        elif kind == "repeat" and last is not None:
            both[0].replicas.receive(last)
            both[1].replicas.receive(last)
        elif kind == "fetch":
            peer.fetch(other)
        elif kind == "restart":
            peer.start()
            peer.meet(other)
            other.meet(peer)
    for _ in range(4):
        clock.now += 1.0
        exchange(*both)
        both[0].fetch(both[1])
        both[1].fetch(both[0])
    clock.now += 8.5
    exchange(*both)
    for peer in both:
        peer.reservations.expire()
    exchange(*both)
    assert both[0].live() == both[1].live()
    for target in (("p-0", 0), ("p-1", 0)):
        left, right = (peer.reservations.claims(target, clock.now - 100) for peer in both)
        assert left == right
    assert len(both[0].reservations.pending) == len(both[1].reservations.pending)


class Records:
    """Membership and loads as this test sets them: p-0 is idle, the others have work for 8 s."""

    def __init__(self, now: float) -> None:
        self.connected = True
        self.records: dict[str, MembershipRecord] = {}
        self.samples: dict[tuple[str, int], LoadSample] = {}
        for name in ("p-0", "p-1", "p-2", "p-3", "d-0"):
            self.records[name] = MembershipRecord(
                instance=name,
                incarnation="i",
                role=ROLE_DECODE if name == "d-0" else ROLE_PREFILL,
                domains=[DomainRecord(epoch="e", num_blocks=1000)],
                models=[ModelRef(name="m", revision="rev")],
            )
            report = LoadReport(
                domain=DomainRef(instance=name, incarnation="i", epoch="e"),
                total_blocks=1000,
                available_blocks=1000,
                prefill_tokens_per_s=1000.0,
                waiting_prefill_tokens=0 if name == "p-0" else 8000,
            )
            self.samples[(name, 0)] = LoadSample(report, now)


def router_of(peer: Peer, records: Records, seed: int) -> Router:
    fences, times = Fences(peer.clock), ReportTimes(peer.clock)
    for sample in records.samples.values():
        times.on_report(sample.report)
    view = MeshView(records, records, fences, peer.reservations, times, peer.clock)
    for record in records.records.values():
        view.see(record)
    facts = ModelFacts(32, 10_000)
    return Router(view, BlockIndex(1 << 20), peer.reservations, lambda _: facts, Costs(), 60.0, random.Random(seed))


def burst(num_routers: int, *, shared: bool = False) -> int:
    """Prompts of 16 that one or two routers send in turn to the idle instance before the next load report comes."""
    clock, *both = pair()
    routers = [router_of(peer, Records(clock.now), seed) for seed, peer in enumerate(both)]
    chosen: Counter[str] = Counter()
    for number in range(16):
        request = PlacePrefillRequest(
            request_id=f"q{number}",
            gateway=InstanceRef(instance="g-0", incarnation="gi"),
            model_revision="rev",
            prompt_tokens=1000,
            max_tokens=64,
        )
        chosen[routers[number % num_routers].place_prefill(request).target.domain.instance] += 1
        if shared:
            exchange(*both)
    return chosen["p-0"]


def test_two_routers_that_share_do_not_herd() -> None:
    alone = burst(1)
    assert burst(2) >= alone + 3, "two that know nothing of each other each send their share"
    assert abs(burst(2, shared=True) - alone) <= 1
