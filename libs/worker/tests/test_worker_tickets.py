"""Tickets: single use, bound, and gone at their deadline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.v1 import errors_pb2
from tidemill_engine.messages import RequestKey
from tidemill_mesh.errors import MeshError
from tidemill_worker.tickets import DomainId, TicketBook

P = DomainId("prefill-1", "i1", 0, "e1")
D = DomainId("decode-1", "i2", 0, "e2")
KEY = RequestKey("r", 0, 0)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_ticket_is_redeemed_once() -> None:
    book = TicketBook(Clock())
    entry = book.mint(KEY, P, D, 10)
    assert book.redeem(entry.secret, KEY, P, D) == entry
    with pytest.raises(MeshError) as raised:
        book.redeem(entry.secret, KEY, P, D)
    assert raised.value.code == errors_pb2.ERROR_CODE_STALE


def test_a_ticket_ends_with_its_time() -> None:
    clock = Clock()
    book = TicketBook(clock)
    entry = book.mint(KEY, P, D, 10)
    clock.now += 10
    with pytest.raises(MeshError, match="expired"):
        book.redeem(entry.secret, KEY, P, D)
    assert len(book) == 0


def test_a_second_ticket_of_a_request_revokes_the_first() -> None:
    book = TicketBook(Clock())
    first, second = book.mint(KEY, P, D, 10), book.mint(KEY, P, D, 10)
    with pytest.raises(MeshError, match="unknown or spent"):
        book.redeem(first.secret, KEY, P, D)
    assert book.redeem(second.secret, KEY, P, D) == second


@given(
    st.sampled_from(["key", "prefill", "decode"]),
    st.sampled_from(["instance", "incarnation", "domain", "epoch"]),
)
def test_another_binding_spends_the_ticket_and_is_refused(what: str, part: str) -> None:
    book = TicketBook(Clock())
    entry = book.mint(KEY, P, D, 10)
    key, prefill, decode = KEY, P, D
    if what == "key":
        key = RequestKey("r", 0, 1)
    else:
        values = {"instance": "x", "incarnation": "x", "domain": 9, "epoch": "x"}
        changed = DomainId(**({**vars(P if what == "prefill" else D), part: values[part]}))
        prefill, decode = (changed, D) if what == "prefill" else (P, changed)
    with pytest.raises(MeshError) as raised:
        book.redeem(entry.secret, key, prefill, decode)
    assert raised.value.code == errors_pb2.ERROR_CODE_STALE
    assert len(book) == 0


@given(st.lists(st.tuples(st.sampled_from(["mint", "redeem", "revoke", "expire", "wait"]), st.integers(0, 4))))
def test_no_history_leaves_a_ticket_behind(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    book = TicketBook(clock)
    valid: dict[RequestKey, tuple[bytes, float]] = {}
    for step, number in steps:
        key = RequestKey(f"r{number}")
        if step == "mint":
            valid[key] = (book.mint(key, P, D, 5.0).secret, clock.now + 5.0)
        elif step == "redeem" and key in valid:
            secret, expires_at = valid.pop(key)
            if clock.now < expires_at:
                assert book.redeem(secret, key, P, D).key == key
            else:
                with pytest.raises(MeshError):
                    book.redeem(secret, key, P, D)
        elif step == "revoke":
            assert book.revoke(key) == (valid.pop(key, None) is not None)
        elif step == "expire":
            over = {entry.key for entry in book.expire()}
            assert over == {key for key, (_, expires_at) in valid.items() if clock.now >= expires_at}
            valid = {key: value for key, value in valid.items() if key not in over}
        elif step == "wait":
            clock.now += number
        assert len(book) == len(valid)
    clock.now += 5.0
    book.expire()
    assert len(book) == 0


def test_secrets_are_unguessable_and_differ() -> None:
    book = TicketBook(Clock())
    secrets = {book.mint(RequestKey(str(number)), P, D, 1).secret for number in range(100)}
    assert len(secrets) == 100
    assert {len(secret) for secret in secrets} == {16}
