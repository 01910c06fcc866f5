"""Weighted fair share between tenants."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_engine.scheduler.fair_share import FairShare


@dataclass(eq=False)
class Holder:
    """What a share is charged by of a request."""

    tenant: str
    tenant_weight: float
    seq: SimpleNamespace


def flood(service: Any, shares: dict[str, float], steps: int, length: int = 24) -> dict[str, int]:
    """Keeps prompts of every tenant waiting; returns prompt tokens computed for each."""
    names: dict[Any, str] = {}
    service.runner.on_step = lambda: setattr(service, "now_s", service.now_s + 0.05)
    for index in range(steps):
        for tenant, weight in shares.items():
            waiting = [key for key, owner in names.items() if owner == tenant and not service.finish(key)]
            for extra in range(4 - len(waiting)):
                name = f"{tenant}{index}.{extra}"
                prompt = [*divmod(len(names), 900), *[1] * (length - 2)]
                key = service.submit(name, prompt, max_tokens=1, tenant=tenant, tenant_weight=weight)
                names[key] = tenant
        service.step(0.0)
    done = dict.fromkeys(shares, 0)
    for key, tenant in names.items():
        done[tenant] += length * (service.finish(key) is not None)
    return done


def test_tenants_that_always_want_more_get_their_weighted_shares(emulated_service: Callable[..., Any]):
    service = emulated_service(num_blocks=2000, tenant_burst_s=0.2)
    done = flood(service, {"gold": 3.0, "free": 1.0}, 200)
    assert done["gold"] / done["free"] == pytest.approx(3.0, rel=0.15)


def test_a_flood_of_one_tenant_delays_another_by_the_burst_at_most(emulated_service: Callable[..., Any]):
    service = emulated_service(num_blocks=4000, tenant_burst_s=0.2)
    service.runner.on_step = lambda: setattr(service, "now_s", service.now_s + 0.05)
    for index in range(200):
        service.submit(f"flood{index}", [index] * 30, max_tokens=1, tenant="flood")
    service.step(0.0)
    single = service.submit("single", list(range(60)), max_tokens=1, tenant="single")
    for _ in range(8):
        service.step(0.0)
    assert service.finish(single) == "length"


def test_a_tenant_that_holds_most_of_the_pool_pays_for_it(emulated_service: Callable[..., Any]):
    service = emulated_service(num_blocks=200, tenant_burst_s=0.1, max_num_seqs=8)
    service.runner.on_step = lambda: setattr(service, "now_s", service.now_s + 0.05)
    service.submit("big", list(range(600)), max_tokens=60, tenant="holder")
    service.submit("small", [7], max_tokens=60, tenant="other")
    while service.engine.scheduler.state.waiting or not all(
        request.is_decoding for request in service.engine.scheduler.state.running
    ):
        service.step(0.0)
    for _ in range(10):
        service.step(0.0)
    first = service.submit("first", [1] * 20, max_tokens=1, tenant="holder")
    second = service.submit("second", [2] * 28, max_tokens=1, tenant="other")
    while not service.finish(first):
        service.step(0.0)
    order = [o.key for report in service.reports for o in report.outputs if o.finish]
    assert order.index(second) < order.index(first)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=2, max_size=4),
    kv_shares=st.lists(st.sampled_from([0.0, 0.2, 0.9]), min_size=4, max_size=4),
    burst_s=st.sampled_from([0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_whoever_always_wants_more_gets_its_share_of_what_is_scarcer_within_the_burst(
    weights, kv_shares, burst_s, seed
):
    """One tenant computes in each step, the first that `arrange` names; all hold their blocks meanwhile."""
    step_s, shares, rng = 0.05, FairShare(burst_s), random.Random(seed)
    requests: list[Any] = [
        Holder(f"t{i}", weight, SimpleNamespace(block_ids=[0] * round(100 * kv_share)))
        for i, (weight, kv_share) in enumerate(zip(weights, kv_shares, strict=False))
    ]
    for request in requests:
        shares.enter(request.tenant)
    had_s = dict.fromkeys((request.tenant for request in requests), 0.0)
    for _ in range(400):
        first = shares.arrange(rng.sample(requests, len(requests)))[0]
        assert had_s[first.tenant] <= min(had_s.values()) + burst_s + 1e-9
        shares.charge({first: 32}, requests, 100, step_s)
        for request in requests:
            tokens, blocks = float(request is first), len(request.seq.block_ids) / 100
            had_s[request.tenant] += max(tokens, blocks) * step_s / request.tenant_weight
    if not any(kv_shares[: len(weights)]):
        spread_s = max(had_s.values()) - min(had_s.values())
        assert spread_s <= burst_s + step_s / min(weights) + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_tenant_is_known_only_while_it_has_requests(steps):
    shares, live = FairShare(1.0), dict.fromkeys("abc", 0)
    for tenant, comes in steps:
        if comes:
            shares.enter(tenant)
            live[tenant] += 1
        elif live[tenant]:
            shares.leave(tenant)
            live[tenant] -= 1
        assert shares.contended == (sum(1 for count in live.values() if count) > 1)


def test_who_comes_back_gets_no_credit_for_having_been_away():
    shares = FairShare(1.0)
    shares.enter("busy")
    shares._charged_s["busy"] = 100.0
    shares.enter("back")
    assert shares._charged_s["back"] == 100.0
