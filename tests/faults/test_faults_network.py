"""What goes wrong around the processes: lines are cut, and the wall clock steps.

A cut line: nobody is told, packets only vanish. What is behind it counts as lost within the liveness bound.
"""

import asyncio
import time
from collections.abc import Callable

import httpx2
import pytest
from faults.seen import Watch, scrape, total
from faults.spread import behind, rank_behind
from faults.wave import PATIENCE_S, run_whole, until_all_are_routable, whole_again, worker_fault
from harness.pairs import LIVENESS_S

from tidemill.v1 import errors_pb2

CONNECTED = {"nats": "bus_connected", "etcd": "etcd_connected"}
"""What a service says of its connection to a server."""
# The client pings each 10 s, and waits as long for an answer.
CLIENT_TIMEOUT_S = 60.0
STEP_S = 3600.0
STEP_BOUND_S = 600.0
LONG_SILENCE = "--silent-s=3600"
"""So that no probe meets the line meanwhile, however slow the machine is."""
SHORT_SILENCE = "--silent-s=40"
"""As long as it takes to be seen."""
ROUNDS = 3
"""A process that a busy machine did not run for liveness_s is left by its streams, and its lease may end."""


@pytest.fixture
def wave(spread_wave):
    return spread_wave


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(LIVENESS_S / 3)


async def until_cut_off(spread, victim) -> None:
    """Waits until its lease has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while victim in (await spread.look()).members:
            await asyncio.sleep(LIVENESS_S / 3)


async def test_a_decode_instance_that_is_cut_off_costs_an_attempt_and_no_token(spread, line, wave):
    async with behind(spread, line, "decode-2"):
        seen = Watch(spread)
        async with worker_fault(wave, spread, "decode", "decode-2"):
            line.cut()
        await seen.assert_loss_of("decode-2")
        await run_whole(wave(streams=4, output_tokens=20))
        line.mend()
        await whole_again(spread, wave)


@pytest.mark.full
@pytest.mark.parametrize(("victim", "after_tokens"), [("router-1", 20), ("kvstore-1", 1), ("autoscaler-1", 100)])
async def test_whatever_is_cut_off_until_its_lease_ends_costs_no_token(spread, line, wave, victim, after_tokens):
    async with behind(spread, line, victim):
        seen = Watch(spread)
        async with wave() as disturbed:
            await disturbed.until_tokens(after_tokens)
            line.cut()
        disturbed.check_whole()
        await lost_and_back(spread, line, wave, victim, seen)


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_that_is_cut_off_until_its_lease_ends_costs_no_token(spread, line, wave, role):
    victim = f"{role}-2"
    async with behind(spread, line, victim):
        seen = Watch(spread)
        async with worker_fault(wave, spread, role, victim):
            line.cut()
        await lost_and_back(spread, line, wave, victim, seen)


async def lost_and_back(spread, line, wave, victim, seen) -> None:
    """It counts as lost while it is cut off, under load and once more in idle, and is there again afterwards."""
    await run_whole(wave(streams=4, output_tokens=20))
    await until_cut_off(spread, victim)
    await seen.assert_loss_of(victim)
    line.mend()
    await whole_again(spread, wave)
    # Once more, while nothing runs.
    line.cut()
    await run_whole(wave(streams=4, output_tokens=20))
    await until_cut_off(spread, victim)
    await run_whole(wave(streams=4, output_tokens=20))
    line.mend()
    await whole_again(spread, wave)


async def failed_hand_over(wave) -> None:
    """Waves of requests until one of them has met the cut line; all are whole."""
    async with asyncio.timeout(2 * PATIENCE_S):
        attempts = 1
        while attempts == 1:
            async with wave(output_tokens=20) as disturbed:
                pass
            disturbed.check_whole()
            attempts = max(stream.attempts for stream in disturbed.streams)


@pytest.mark.parametrize(
    ("victim", "after_tokens", "also_idle"),
    [("decode-2", 200, False), pytest.param("prefill-2", 1, True, marks=pytest.mark.full)],
)
async def test_a_rank_that_alone_is_cut_off_costs_attempts_and_no_token(
    spread, line, wave, victim, after_tokens, also_idle
):
    async with rank_behind(spread, line, victim):
        await until_all_are_routable(spread)
        seen = Watch(spread)
        async with wave(output_tokens=300) as disturbed:
            await disturbed.until_tokens(after_tokens)
            line.cut()
        disturbed.check_whole()
        if all(stream.attempts == 1 for stream in disturbed.streams):
            await failed_hand_over(wave)
        await seen.assert_seen("rank's line cut, its worker's not")
        # Its worker is reached by all, and they by it.
        await spread.until_members(*(name for _, name in spread.spec.instances()))
        line.mend()
        await whole_again(spread, wave)
        if also_idle:
            line.cut()
            await failed_hand_over(wave)
            line.mend()
            await whole_again(spread, wave)


async def measured(spread, instance, name, label="") -> float:
    """What an instance offers of a metric."""
    service = instance.partition("-")[0]
    return total(await asyncio.to_thread(scrape, spread, instance), f"tidemill_{service}_{name}", label) or 0.0


@pytest.mark.parametrize("victim", ["decode-2", pytest.param("prefill-2", marks=pytest.mark.full)])
async def test_only_the_first_requests_wait_for_a_rank_that_is_cut_off_alone(spread, line, wave, victim):
    for instance in {"decode-1", "decode-2"} - {victim}:
        await asyncio.to_thread(spread.replace, instance, [*spread.cluster.record(instance).argv, LONG_SILENCE])
    async with rank_behind(spread, line, victim, LONG_SILENCE):
        await until_all_are_routable(spread)
        seen = Watch(spread)
        line.cut()
        async with asyncio.timeout(2 * PATIENCE_S):
            # Each of the two on the other side is met by chance.
            while await measured(spread, "router-1", "quarantined_pairs") < 2:
                await run_whole(wave(output_tokens=20))
        await seen.assert_seen("rank's line cut, its worker's not")
        for _ in range(ROUNDS):
            async with wave(output_tokens=20) as undisturbed:
                pass
            undisturbed.check_whole()
            assert {stream.attempts for stream in undisturbed.streams} == {1}, "a request met the line"
        line.mend()
    await whole_again(spread, wave)


@pytest.mark.full
async def test_a_silence_ends_by_itself_once_the_line_is_mended(spread, line, wave):
    async with rank_behind(spread, line, "decode-2", SHORT_SILENCE):
        await until_all_are_routable(spread)
        line.cut()
        async with asyncio.timeout(2 * PATIENCE_S):
            while not await measured(spread, "decode-2", "silent_sources"):
                await run_whole(wave(output_tokens=20))
        line.mend()
        taken = await measured(spread, "decode-2", "hand_overs_total", 'outcome="done"')
        async with asyncio.timeout(2 * PATIENCE_S):
            while (
                await measured(spread, "decode-2", "silent_sources")
                or await measured(spread, "decode-2", "hand_overs_total", 'outcome="done"') == taken
            ):
                await run_whole(wave(output_tokens=20))
        await whole_again(spread, wave)


@pytest.mark.full
async def test_a_gateway_that_is_cut_off_is_the_end_of_its_own_streams_only(spread, line, wave):
    gateways = ("gateway-1", "gateway-2")
    async with behind(spread, line, "gateway-1"):
        seen = Watch(spread)
        # More tokens than a worker may be ahead of a client.
        async with wave(output_tokens=600, gateways=gateways, timeout_s=CLIENT_TIMEOUT_S) as disturbed:
            await disturbed.until_tokens(200)
            line.cut()
            # The workers give up what it had, while its clients still wait.
            await until_cut_off(spread, "gateway-1")
        for stream in disturbed.of("gateway-2"):
            stream.check_whole()
        disturbed.check_cut(disturbed.of("gateway-1"), errors_pb2.ERROR_CODE_UNAVAILABLE)
        await seen.assert_seen("gateway cut off")
        await run_whole(wave(streams=4, output_tokens=20, gateways=["gateway-2"]))
        line.mend()
        await whole_again(spread, wave)
        # Once more, while nothing runs.
        line.cut()
        await until_cut_off(spread, "gateway-1")
        await run_whole(wave(streams=4, output_tokens=20, gateways=["gateway-2"]))
        line.mend()
        await whole_again(spread, wave)


async def all_are_cut_off(spread, server) -> None:
    """Waits until each service says that it does not reach the server."""

    def says_so(service, instance):
        return total(scrape(spread, instance), f"tidemill_{service}_{CONNECTED[server]}") == 0.0

    await until(lambda: all(says_so(*instance) for instance in spread.spec.instances()))


@pytest.mark.parametrize("server", ["nats", pytest.param("etcd", marks=pytest.mark.full)])
async def test_a_server_that_all_are_cut_off_from_costs_no_token(spread, servers, wave, server):
    seen = Watch(spread)
    try:
        async with wave(output_tokens=300) as disturbed:
            await disturbed.until_tokens(20)
            servers[server].cut()
            await all_are_cut_off(spread, server)
        disturbed.check_whole()
        await run_whole(wave(streams=4, output_tokens=20))
        await seen.assert_loss_of(server)
    finally:
        servers[server].mend()
    await whole_again(spread, wave)


@pytest.mark.full
@pytest.mark.parametrize("server", ["nats", "etcd"])
async def test_a_server_cut_off_in_idle_costs_the_next_requests_nothing(spread, servers, wave, server):
    await spread.holds_are_zero()
    try:
        servers[server].cut()
        await all_are_cut_off(spread, server)
        await run_whole(wave(streams=4, output_tokens=20))
    finally:
        servers[server].mend()
    await whole_again(spread, wave)


async def gateways_clock(cluster) -> int:
    """What its answers say of when they were made, Unix time."""
    async with httpx2.AsyncClient(timeout=300) as http:
        body = {"model": cluster.model, "prompt": "x", "max_tokens": 1}
        return (await http.post(f"{cluster.base_url}/completions", json=body)).json()["created"]


async def incarnations(cluster):
    return {name: member.record.incarnation for name, member in (await cluster.look()).members.items()}


@pytest.mark.parametrize(
    ("ahead_s", "also_idle"), [(STEP_S, False), pytest.param(-STEP_S, True, marks=pytest.mark.full)]
)
async def test_steps_of_the_clock_cost_no_token_and_no_membership(spread, shim, wave, ahead_s, also_idle):
    for _ in range(ROUNDS):
        before, attempts = await incarnations(spread), set()
        for clock_s in (ahead_s, 0.0):
            async with wave(output_tokens=300) as disturbed:
                await disturbed.until_tokens(100)
                shim.set_clock(clock_s)
            disturbed.check_whole()
            attempts |= {stream.attempts for stream in disturbed.streams}
            assert abs(await gateways_clock(spread) - time.time() - clock_s) < STEP_BOUND_S
            await whole_again(spread, wave)
        for clock_s in (ahead_s, 0.0) if also_idle else ():
            shim.set_clock(clock_s)
            await whole_again(spread, wave)
        if unnoticed := attempts == {1} and await incarnations(spread) == before:
            break
    assert unnoticed, "no stream and no member may notice"
