"""Reservations never outlive their owner, target or deadline, and count as load until a report can know of them."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.router_pb2 import LiveReservation, Report
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_router.candidate import Claims
from tidemill_router.fences import Fences
from tidemill_router.reports import apply_reports, restore
from tidemill_router.reservations import DECODE, PREFILL, SOFT, WHOLE, Reservations
from tidemill_router.turnover import Turnover

GATEWAY = ("g-0", "i1")
P = DomainRef(instance="p-0", incarnation="pi", domain=0, epoch="e")
D = DomainRef(instance="d-0", incarnation="di", domain=0, epoch="e")
HASHES = hash_blocks(chain_root(b"m", b""), range(4), 1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Clock, Reservations]:
    clock = Clock()
    return clock, Reservations("r1", 9.0, clock, Turnover(300.0, clock))


def test_a_reservation_counts_until_the_load_report_can_know_of_it() -> None:
    clock, reservations = make()
    reservations.reserve(PREFILL, GATEWAY, P, prefill_tokens=500)
    assert reservations.claims(("p-0", 0), clock.now) == Claims(prefill_tokens=500)
    assert reservations.claims(("p-0", 0), clock.now + 0.05).prefill_tokens == 500
    assert reservations.claims(("p-0", 0), clock.now + 0.2) == Claims()
    assert reservations.claims(("p-0", 0), float("-inf")).prefill_tokens == 500


def test_a_computed_prompt_is_no_longer_ahead_of_others() -> None:
    clock, reservations = make()
    made = reservations.reserve(PREFILL, GATEWAY, P, prefill_tokens=500)
    assert reservations.prefilled(made.id)
    assert reservations.claims(("p-0", 0), clock.now) == Claims()
    assert len(reservations) == 1


def test_a_reservation_ends_at_its_deadline_unless_renewed() -> None:
    clock, reservations = make()
    kept = reservations.reserve(DECODE, GATEWAY, D, blocks=3)
    lost = reservations.reserve(DECODE, GATEWAY, D, blocks=3)
    clock.now += 5
    assert reservations.renew(kept.id)
    clock.now += 5
    assert reservations.expire() == [lost]
    assert not reservations.renew(lost.id)
    assert len(reservations) == 1


def test_a_soft_claim_falls_with_its_prefill_and_is_settled_by_the_decode() -> None:
    clock, reservations = make()
    first = reservations.reserve(PREFILL, GATEWAY, P, request=("a", 0))
    reservations.claim_decode(first, D, 7)
    assert reservations.claims(("d-0", 0), clock.now + 100) == Claims(blocks=7)
    reservations.settle_decode(("a", 0))
    assert reservations.claims(("d-0", 0), clock.now) == Claims()
    second = reservations.reserve(PREFILL, GATEWAY, P, request=("b", 0))
    reservations.claim_decode(second, D, 7)
    reservations.renew(second.id)
    reservations.end(second.id, "done")
    reservations.end(first.id, "done")
    assert len(reservations) == 0
    assert reservations.count_by_kind() == {PREFILL: 0, DECODE: 0, WHOLE: 0, SOFT: 0}


def test_pending_prefixes_live_as_long_as_their_reservations() -> None:
    _, reservations = make()
    one = reservations.reserve(PREFILL, GATEWAY, P, hashes=HASHES)
    two = reservations.reserve(PREFILL, GATEWAY, P, hashes=HASHES[:2])
    assert reservations.pending.depth(("p-0", 0), HASHES) == 4
    reservations.end(one.id, "done")
    assert reservations.pending.depth(("p-0", 0), HASHES) == 2
    reservations.end(two.id, "done")
    assert (reservations.pending.depth(("p-0", 0), HASHES), len(reservations.pending)) == (0, 0)


def test_a_dead_gateway_and_a_dead_target_free_what_was_theirs() -> None:
    _, reservations = make()
    reservations.reserve(PREFILL, GATEWAY, P)
    reservations.reserve(PREFILL, ("g-0", "i2"), P)
    reservations.reserve(DECODE, ("g-1", "i1"), D)
    assert len(reservations.drop_owner("g-0", keep_incarnation="i2")) == 1
    assert len(reservations.drop_target("d-0", keep_incarnation="di")) == 0
    assert len(reservations.drop_target("d-0", keep_incarnation="other")) == 1
    assert len(reservations.drop_owner("g-0")) == 1
    assert len(reservations) == 0


def test_reports_end_renew_and_name_what_is_unknown() -> None:
    clock, reservations = make()
    fences = Fences(clock)
    ids = [reservations.reserve(DECODE, GATEWAY, D).id for _ in range(3)]
    kinds = [Report.KIND_DONE, Report.KIND_CANCELLED, Report.KIND_ALIVE]
    reports = [Report(reservation_id=i, kind=kind) for i, kind in zip(ids, kinds, strict=True)]
    assert list(apply_reports(reports, reservations, fences).unknown_reservation_ids) == []
    assert list(apply_reports(reports, reservations, fences).unknown_reservation_ids) == ids[:2]
    assert len(reservations) == 1


def test_a_lost_instance_is_fenced_even_by_an_unknown_reservation() -> None:
    clock, reservations = make()
    fences = Fences(clock)
    report = Report(reservation_id="gone", kind=Report.KIND_FAILED, instance_lost=True, domain=D)
    apply_reports([report], reservations, fences)
    assert fences.is_fenced("d-0", "di")
    assert not fences.is_fenced("d-0", "newer")
    assert not fences.heard_from("d-0", "di"), "a report on its way when the instance died proves nothing"
    clock.now += 1
    assert fences.heard_from("d-0", "di")
    assert not fences.is_fenced("d-0", "di")


def test_a_fence_is_forgotten_with_its_instance() -> None:
    fences = Fences(Clock())
    fences.fence("d-0", "di")
    fences.fence("d-0", "di2")
    fences.forget("d-0", keep_incarnation="di2")
    assert len(fences) == 1
    fences.forget("d-0")
    assert len(fences) == 0


def test_a_restarted_router_takes_over_what_gateways_have_in_flight() -> None:
    clock, reservations = make()
    live = [
        LiveReservation(reservation_id="old-1", request_id="a", domain=P, tokens=300),
        LiveReservation(reservation_id="old-2", request_id="b", domain=D, decode=True, tokens=900),
    ]
    for _ in range(2):
        restore(InstanceRef(instance="g-0", incarnation="i1"), live, reservations)
    assert len(reservations) == 2
    assert reservations.claims(("p-0", 0), clock.now) == Claims(prefill_tokens=300)
    assert reservations.claims(("d-0", 0), clock.now) == Claims(sequences=1)
    assert reservations.end("old-1", "done")
    assert reservations.end("old-2", "done")


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve", "soft", "settle", "end", "renew", "prefilled", "expire", "gateway", "target", "wait"]
        ),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(steps=steps)
def test_counts_are_never_negative_and_return_to_zero(steps: list[tuple[str, int]]) -> None:
    clock, reservations = make()
    ids = [""]
    for kind, number in steps:
        chosen = ids[number % len(ids)]
        found = reservations.get(chosen)
        request = (f"r{number % 3}", 0)
        if kind == "reserve":
            domain = P if number % 2 else D
            made = reservations.reserve(
                [PREFILL, DECODE, WHOLE][number % 3],
                (f"g-{number % 2}", "i"),
                domain,
                prefill_tokens=number,
                blocks=number,
                hashes=HASHES[:number],
                request=request,
            )
            ids.append(made.id)
        elif kind == "soft" and found is not None and not found.soft_id:
            reservations.claim_decode(found, D, number)
        elif kind == "settle":
            reservations.settle_decode(request)
        elif kind == "end":
            reservations.end(chosen, "done")
        elif kind == "renew":
            reservations.renew(chosen)
        elif kind == "prefilled":
            reservations.prefilled(chosen)
        elif kind == "expire":
            reservations.expire()
        elif kind == "gateway":
            reservations.drop_owner(f"g-{number % 2}")
        elif kind == "target":
            reservations.drop_target("p-0" if number % 2 else "d-0")
        elif kind == "wait":
            clock.now += number
        assert sum(reservations.count_by_kind().values()) == len(reservations)
        for holder in (("p-0", 0), ("d-0", 0)):
            claims = reservations.claims(holder, float("-inf"))
            assert min(claims.prefill_tokens, claims.sequences, claims.blocks) >= 0
    clock.now += 100
    reservations.expire()
    assert (len(reservations), len(reservations.pending)) == (0, 0)
    for holder in (("p-0", 0), ("d-0", 0)):
        assert reservations.claims(holder, float("-inf")) == Claims()
        assert reservations.on_target(holder) == 0


def test_a_prompt_reported_computed_is_known_to_be_so_before_the_target_says_it() -> None:
    clock, reservations = make()
    made = reservations.reserve(PREFILL, GATEWAY, P, prefill_tokens=500)
    clock.now += 1.0
    reservations.prefilled(made.id)
    assert reservations.computed.tokens_since(("p-0", 0), clock.now - 0.5) == 500
    assert reservations.computed.tokens_since(("p-0", 0), clock.now) == 0
