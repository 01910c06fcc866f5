"""Growth waits a moment for blocks that transfers give back, and takes somebody's when they do not."""

from collections.abc import Callable
from typing import Any

import pytest

from tidemill_engine.messages import Abort, OnboardReady, PinBlocks, Release, UnpinBlocks
from tidemill_kvcache.hashing import hash_blocks

PAST = list(range(900, 912))
"""Three blocks."""


def holding(service: Any, holder: str) -> Callable[[], None]:
    """Three blocks go under a transfer; the call that ends it."""
    if holder == "pin":
        service.submit("past", PAST, max_tokens=1)
        service.run()
        service.engine.handle(PinBlocks(1, hash_blocks(b"r" * 16, PAST, 4)))
        return lambda: service.engine.handle(UnpinBlocks(1))
    if holder == "hand-over":
        key = service.submit("past", PAST, max_tokens=2, stage="prefill", hold_s=50.0)
        service.run()
        return lambda: service.engine.handle(Release(key))
    key = service.submit("past", PAST, max_tokens=1)
    service.run()
    assert [wanted.key for wanted in service.onboards] == [key]
    if holder == "late answer":
        service.engine.handle(Abort(key))
    return lambda: service.engine.handle(OnboardReady(key, 0))


def two_that_outgrow(service: Any) -> list[Any]:
    """Two prompts of four blocks that grow by three each, not at the same step: the second goes on while one waits."""
    return [service.submit(f"r{i}", [i] * (15 - 2 * i), max_tokens=13) for i in range(2)]


def preemptions(service: Any) -> int:
    count: int = service.engine.scheduler.load_sample().preemptions_total
    return count


def until_one_waits(service: Any) -> None:
    for _ in range(50):
        if waiting_to_grow(service):
            return
        service.step()
    raise AssertionError("there were blocks enough: nothing is shown")


def waiting_to_grow(service: Any) -> list[Any]:
    return [request for request in service.engine.scheduler.state.running if request.outgrown_since_s >= 0]


@pytest.mark.parametrize("holder", ["pin", "hand-over", "onboarding", "late answer"])
def test_it_waits_for_blocks_that_come_free_and_nobody_loses_any(emulated_service, emulated_continuation, holder):
    onboard = holder in ("onboarding", "late answer")
    service = emulated_service(
        num_blocks=15,
        admission_headroom_tokens=1,
        onboard_enabled=onboard,
        onboard_min_blocks=2,
        onboard_deadline_s=50.0,
    )
    give_back = holding(service, holder)
    keys = two_that_outgrow(service)
    if onboard:
        service.step()
        for wanted in service.onboards[1:]:
            service.engine.handle(OnboardReady(wanted.key, 0))
    until_one_waits(service)
    assert preemptions(service) == 0
    give_back()
    service.step()
    assert not waiting_to_grow(service)
    service.run()
    for index, key in enumerate(keys):
        assert service.tokens(key) == emulated_continuation([index] * (15 - 2 * index), 13)
    assert preemptions(service) == 0
    service.assert_nothing_held()


def test_others_go_on_and_the_wait_ends_by_its_time_where_nothing_comes_free(emulated_service, emulated_continuation):
    service = emulated_service(num_blocks=15, admission_headroom_tokens=1, growth_wait_s=0.04)
    holding(service, "pin")
    keys = two_that_outgrow(service)
    until_one_waits(service)
    (first,) = waiting_to_grow(service)
    assert first.key == keys[0]
    tokens = len(service.tokens(keys[1]))
    while service.step():
        pass
    assert len(service.tokens(keys[1])) > tokens
    assert preemptions(service) == 0
    assert service.engine.next_timer_s == pytest.approx(first.outgrown_since_s + 0.04)
    service.now_s = service.engine.next_timer_s
    assert service.step()
    assert preemptions(service) == 1
    service.run()
    for index, key in enumerate(keys):
        assert service.tokens(key) == emulated_continuation([index] * (15 - 2 * index), 13)
    service.now_s += 100.0
    service.run()
    service.assert_nothing_held()


def test_it_waits_no_longer_than_the_one_that_would_give_way_takes_to_compute(emulated_service):
    service = emulated_service(num_blocks=15, admission_headroom_tokens=1, growth_wait_s=1000.0)
    holding(service, "pin")
    _, weaker = two_that_outgrow(service)
    until_one_waits(service)
    state, since_s = service.engine.scheduler.state, waiting_to_grow(service)[0].outgrown_since_s
    while not preemptions(service):
        assert service.now_s < since_s + 1.0
        service.step()
    waited_s = service.now_s - since_s
    assert waited_s == pytest.approx(state.recompute_s(state.requests[weaker]), abs=0.02)


@pytest.mark.parametrize(("pinned", "growth_wait_s"), [("of its own", 0.5), ("of the past", 0.0)])
def test_it_does_not_wait_where_nothing_would_come_free_or_no_time_is_given(emulated_service, pinned, growth_wait_s):
    service = emulated_service(num_blocks=12, admission_headroom_tokens=1, growth_wait_s=growth_wait_s)
    if pinned == "of the past":
        holding(service, "pin")
    two_that_outgrow(service)
    service.step()
    if pinned == "of its own":
        # A copy of what runs: its end gives nobody a block.
        service.engine.handle(PinBlocks(1, hash_blocks(b"r" * 16, [0] * 12, 4)))
    while not preemptions(service):
        assert service.step()
        assert not waiting_to_grow(service)


def test_one_that_needs_the_whole_pool_waits_for_a_pin_and_others_pass_it_within_the_bound(emulated_service):
    """A pinned block is never taken: who reads it would read another request's under its hash."""
    service = emulated_service(num_blocks=40, max_overtakes=5, admission_headroom_tokens=1, prefill_policy="fcfs")
    past = service.submit("past", PAST, max_tokens=1)
    service.run()
    service.engine.handle(PinBlocks(1, hash_blocks(b"r" * 16, PAST[:4], 4)))
    service.run()
    limit_s = service.now_s + 2 * service.engine.scheduler.state.settings.transfer_limit_s
    large = service.submit("large", [500 + i for i in range(158)], max_tokens=2)
    small = [service.submit(f"s{i}", [900 - i] * 3, max_tokens=2) for i in range(12)]
    service.run()
    assert service.finish(past) == "length"
    assert service.finish(large) is None
    assert len([key for key in small if service.finish(key)]) == 5
    assert service.engine.next_timer_s == pytest.approx(limit_s, abs=0.1)
    service.now_s = service.engine.next_timer_s
    service.run()
    assert all(service.finish(key) == "length" for key in [large, *small])
    service.assert_nothing_held()
