"""Limits of tenants: what one gateway decides, and what several know of each other."""

import asyncio
import contextlib
from dataclasses import replace

import httpx2
import pytest
from gateway_emulated import TEXT, canned
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1.events_pb2 import TenantCount, TenantUse
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill.v1 import errors_pb2
from tidemill_gateway.tenants.budgets import Budgets
from tidemill_gateway.tenants.limits import LimitsFileError, LimitTable, TenantLimits, load_limits
from tidemill_mesh.errors import MeshError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def budgets(clock: Clock, share: float = 1.0, **limits: int) -> Budgets:
    return Budgets(LimitTable(TenantLimits(**limits), {"free": TenantLimits()}), clock, lambda: share)


def refusal(of: Budgets, tenant: str = "acme") -> MeshError | None:
    try:
        with of.admitted(tenant):
            return None
    except MeshError as error:
        return error


def exchange(*gateways: Budgets) -> None:
    """Every gateway hears what every other one has to say."""
    for i, sender in enumerate(gateways):
        for j, receiver in enumerate(gateways):
            if i != j:
                receiver.hear((f"g{i}", "one"), sender.report())


def test_requests_at_once_are_bounded_and_the_wait_is_what_requests_take():
    clock = Clock()
    acme = budgets(clock, concurrent_requests=2)
    for _ in range(50):
        with acme.admitted("acme"):
            clock.now += 4.0
    with acme.admitted("acme"), acme.admitted("acme"):
        refused = refusal(acme)
        assert (refused.code, refused.limit) == (errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "2 requests at once")
        assert refused.retry_after_s == pytest.approx(2.0, rel=0.01)
        assert refusal(acme, "free") is None
        assert refusal(acme, "other") is None
    assert refusal(acme) is None


def test_requests_a_minute_fill_again():
    clock = Clock()
    acme = budgets(clock, requests_per_minute=6)
    assert [refusal(acme) for _ in range(6)] == [None] * 6
    assert refusal(acme).retry_after_s == pytest.approx(10.0)
    clock.now += 10.0
    assert refusal(acme) is None
    assert refusal(acme) is not None


def test_tokens_are_charged_when_known_and_debts_are_waited_for():
    clock = Clock()
    acme = budgets(clock, tokens_per_minute=600)
    with acme.admitted("acme") as charge:
        charge.tokens(500)
        assert refusal(acme) is None
        charge.tokens(200)
    refused = refusal(acme)
    assert refused.limit == "600 tokens a minute"
    assert refused.retry_after_s == pytest.approx(10.1)
    clock.now += refused.retry_after_s
    assert refusal(acme) is None


def test_what_is_used_at_one_gateway_counts_at_the_other():
    clock = Clock()
    one, two = budgets(clock, concurrent_requests=3), budgets(clock, concurrent_requests=3)
    with one.admitted("acme"), one.admitted("acme"):
        exchange(one, two)
        with two.admitted("acme"):
            assert refusal(two) is not None
            exchange(one, two)
            assert refusal(one) is not None
    exchange(one, two)
    assert refusal(two) is None


def test_what_a_new_gateway_used_before_its_first_word_counts_at_older_ones():
    clock = Clock()
    old = budgets(clock, requests_per_minute=6)
    clock.now += 30.0
    new = budgets(clock, requests_per_minute=6)
    for gateway in (old, new, old, new, new):
        assert refusal(gateway) is None
    exchange(old, new)
    assert refusal(old) is None
    assert refusal(old).limit == "6 requests a minute"


def test_a_new_gateway_takes_over_what_is_left_of_the_limits():
    clock = Clock()
    old = budgets(clock, requests_per_minute=6, tokens_per_minute=60)
    with old.admitted("acme") as charge:
        charge.tokens(600)
    clock.now += 1.0
    new = budgets(clock, requests_per_minute=6, tokens_per_minute=60)
    exchange(old, new)
    assert refusal(new).retry_after_s == pytest.approx(refusal(old).retry_after_s)


def test_no_word_counts_twice_whatever_became_of_the_gateway_meanwhile():
    clock = Clock()
    one, two = budgets(clock, requests_per_minute=6), budgets(clock, requests_per_minute=6)
    for _ in range(4):
        assert refusal(two) is None
    one.hear(("two", "first"), two.report())
    one.forget(9.0, [])
    one.hear(("two", "another"), two.report())
    # Beside its successor of the same name, while it drains.
    clock.now += 0.1
    successor = budgets(clock, requests_per_minute=6)
    for _ in range(3):
        one.hear(("two", "successor"), successor.report())
        one.hear(("two", "another"), two.report())
    assert refusal(one) is None
    assert refusal(one) is None
    assert refusal(one) is not None


def test_the_last_release_is_understood_as_before():
    clock = Clock()
    one = budgets(clock, requests_per_minute=6)
    for requests in (1000, 1000, 1005):
        count = TenantCount(tenant="acme", requests=requests)
        one.hear(("old", "i"), TenantUse(tenants=[count]))
    assert refusal(one) is None
    assert refusal(one) is not None


def test_a_gateway_that_left_or_is_silent_holds_nothing():
    clock = Clock()
    one, two = budgets(clock, concurrent_requests=1), budgets(clock, concurrent_requests=1)
    with one.admitted("acme"):
        exchange(one, two)
        two.forget(9.0, [("g0", "one")])
        assert refusal(two) is not None
        two.forget(9.0, [])
        assert refusal(two) is None
        exchange(one, two)
        clock.now += 10.0
        two.forget(9.0, [("g0", "one")])
        assert refusal(two) is None


def test_without_news_each_gateway_keeps_to_its_share():
    clock = Clock()
    half = budgets(clock, share=0.5, concurrent_requests=4, tokens_per_minute=600)
    with half.admitted("acme"), half.admitted("acme") as charge:
        assert refusal(half) is not None
        charge.tokens(700)
    assert refusal(half).retry_after_s == pytest.approx(20.2)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.floats(0.0, 5.0), st.booleans()), max_size=60))
def test_gateways_that_hear_each_other_give_no_more_than_the_limit(events):
    clock = Clock()
    gateways = [budgets(clock, tokens_per_minute=120) for _ in range(3)]
    used, unheard, last = 0, 0, 0
    for at, tokens, pause_s, heard in events:
        clock.now += pause_s
        if heard:
            exchange(*gateways)
            unheard = 0
        with contextlib.suppress(MeshError), gateways[at].admitted("acme") as charge:
            charge.tokens(tokens)
            used, unheard, last = used + tokens, unheard + tokens, tokens
        # What came since the last exchange, and one request's debt at each gateway, may be too much; nothing else.
        assert used <= 120 + 2 * (clock.now - 100.0) + 3 * 40 + unheard + last


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default]\nrequests = 1", "default.requests is not a limit"),
        ("[tenants.a]\ntokens_per_minute = -1", "tenants.a.tokens_per_minute must be"),
        ("[tenant.a]\n", "unknown table 'tenant'"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight must be a number in"),
        ("x = ", "limits.toml"),
        ("tenants = 3", "tables"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(LimitsFileError, match=said):
        load_limits(str(path))


def test_a_tenants_table_changes_what_it_names(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("[default]\nconcurrent_requests = 4\n[tenants.big]\ntokens_per_minute = 100\n")
    table = load_limits(str(path))
    assert table.of("big") == TenantLimits(concurrent_requests=4, tokens_per_minute=100)
    assert table.of("other") == TenantLimits(concurrent_requests=4)
    assert not load_limits("").any


async def test_a_tenants_weight_travels_with_each_stage_of_its_requests(bare_mesh, tmp_path):
    keys, limits = tmp_path / "keys", tmp_path / "limits.toml"
    keys.write_text("gold-key gold\nbase-key base\n")
    limits.write_text("[tenants.gold]\nweight = 2.5\n")
    assert not load_limits(str(limits)).any
    files = {"api_keys_file": str(keys), "tenant_limits_file": str(limits)}
    bare_mesh.settings = replace(bare_mesh.settings, **files)
    workers = [await bare_mesh.add(role) for role in (ROLE_PREFILL, ROLE_DECODE)]
    await bare_mesh.start_gateway()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with httpx2.AsyncClient(timeout=120) as http:
        await bare_mesh.until_ready()
        for key in ("gold-key", "base-key"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post(f"{bare_mesh.http}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
    for worker in workers:
        assert [(submit.tenant, submit.tenant_weight) for submit in worker.submits] == [("gold", 2.5), ("base", 1.0)]


async def test_two_gateways_share_a_tenants_limit(bare_mesh, tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("[default]\nconcurrent_requests = 1\n")
    bare_mesh.settings = replace(bare_mesh.settings, tenant_limits_file=str(path))
    bare_mesh.answer = canned(TEXT, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role, step_s=0.02)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    first, first_task, first_drain = bare_mesh.http, bare_mesh.task, bare_mesh.drain
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900}
    async with httpx2.AsyncClient(timeout=120) as http:
        running = asyncio.create_task(http.post(f"{first}/v1/chat/completions", json=body))
        await bare_mesh.until(lambda: bare_mesh.holds() > 0)
        async with asyncio.timeout(120):
            while True:
                quick = body | {"max_tokens": 1}
                answer = await http.post(f"{bare_mesh.http}/v1/chat/completions", json=quick)
                if answer.status_code == 429:
                    break
        assert answer.json()["error"]["limit"] == "1 requests at once"
        assert float(answer.headers["retry-after-ms"]) > 0
        assert 'refusals_total{limit="concurrent_requests"}' in (await http.get(f"{bare_mesh.http}/metrics")).text
        running.cancel()
        async with asyncio.timeout(120):
            while (await http.post(f"{bare_mesh.http}/v1/chat/completions", json=quick)).status_code != 200:
                await asyncio.sleep(0.02)
    first_drain.request()
    await first_task


@pytest.mark.parametrize("replayed", [False, True])
def test_what_gateways_used_while_they_did_not_hear_each_other_is_no_debt_afterwards(replayed):
    clock, share = Clock(), [1.0]
    table = LimitTable(TenantLimits(), {"acme": TenantLimits(requests_per_minute=60)})
    gateways = [Budgets(table, clock, lambda: share[0]) for _ in range(2)]
    exchange(*gateways)
    share[0] = 0.5
    kept = []
    for _ in range(600):
        clock.now += 1.0
        for gateway in gateways:
            refusal(gateway)
            gateway.forget(9.0, [("g0", "one"), ("g1", "one")])
        kept.append(gateways[1].report())
    share[0] = 1.0
    if replayed:
        for report in kept:
            gateways[0].hear(("g1", "one"), report)
    exchange(*gateways)
    for gateway in gateways:
        error = refusal(gateway)
        assert error is None or error.retry_after_s <= 61.0
    clock.now += 61.0
    assert refusal(gateways[0]) is None
