"""kill -9 of each process under load: a pause for some, never a token lost, changed or repeated, and nothing held."""

import asyncio
import time

import pytest
from faults.seen import Watch
from faults.wave import EndedBefore, run_whole, whole_again, worker_fault

from tidemill.v1 import errors_pb2

# The first test's time includes the start of a cluster.
PATIENCE_S = 180.0
GIVEN_UP_S = 120.0


async def test_an_undisturbed_wave_gives_the_right_tokens(pairs, wave):
    await run_whole(wave())
    await pairs.holds_are_zero()


@pytest.mark.parametrize(
    ("victim", "after_tokens"),
    [("router-1", 20), ("kvstore-1", 1), ("autoscaler-1", 100), ("nats", 20), ("etcd", 20)],
)
async def test_a_killed_process_costs_no_token(pairs, wave, victim, after_tokens):
    seen = Watch(pairs)
    async with wave() as disturbed:
        await disturbed.until_tokens(after_tokens)
        pairs.kill(victim)
    disturbed.check_whole()
    # The others go on without it, before anybody starts it again.
    await run_whole(wave(streams=4, output_tokens=20))
    await seen.assert_loss_of(victim)
    await asyncio.to_thread(pairs.restart, victim)
    await whole_again(pairs, wave)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_costs_an_attempt_and_no_token(pairs, wave, role):
    seen = Watch(pairs)
    async with worker_fault(wave, pairs, role) as victim:
        pairs.kill(victim)
    await seen.assert_seen(f"{role} instance killed")
    await run_whole(wave(streams=4, output_tokens=20))
    await asyncio.to_thread(pairs.restart, victim)
    await whole_again(pairs, wave)


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.full)])
async def test_a_killed_rank_is_replaced_and_costs_no_token(pairs, wave, role):
    seen = Watch(pairs)
    async with worker_fault(wave, pairs, role) as victim:
        killed = pairs.kill_rank(victim)
    await seen.assert_seen("rank killed")
    end = time.monotonic() + PATIENCE_S
    while not pairs.rank_pids(victim) or killed in pairs.rank_pids(victim):
        assert time.monotonic() < end, "no new rank"
        await asyncio.sleep(0.1)
    await whole_again(pairs, wave)


async def test_a_killed_gateway_is_the_end_of_its_own_streams_only(pairs, wave):
    seen = Watch(pairs)
    # More tokens than a worker may be ahead of a client: what nobody reads would be held until somebody ends it.
    async with wave(output_tokens=600) as disturbed:
        await disturbed.until_tokens(400)
        pairs.kill("gateway-1")
    for stream in disturbed.of("gateway-2"):
        stream.check_whole()
    disturbed.check_cut(disturbed.of("gateway-1"), errors_pb2.ERROR_CODE_UNAVAILABLE)

    # Long before the deadline of what they hold.
    end = time.monotonic() + GIVEN_UP_S
    while held := {name: n for name, n in (await pairs.look()).held().items() if not name.startswith("router")}:
        assert time.monotonic() < end, f"the workers still hold {held}"
        await asyncio.sleep(0.05)
    await run_whole(wave(streams=4, output_tokens=20, gateways=["gateway-2"]))
    await seen.assert_seen("gateway killed")
    await asyncio.to_thread(pairs.restart, "gateway-1")
    await whole_again(pairs, wave)


@pytest.mark.full
async def test_with_no_worker_left_every_request_ends_by_its_deadline_with_a_named_error(pairs, wave):
    workers, seen = ["prefill-1", "prefill-2", "decode-1", "decode-2"], Watch(pairs)
    for timeout_s in (4.0, 20.0, 100.0):
        try:
            async with wave(output_tokens=600, timeout_s=timeout_s) as lost:
                await lost.until_tokens(100)
                for worker in workers:
                    pairs.kill(worker)
        except EndedBefore:
            # A slow machine needs longer for these tokens.
            continue
        break
    lost.check_cut(lost.streams, errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, errors_pb2.ERROR_CODE_UNAVAILABLE)
    await seen.assert_seen("all workers of a kind gone")
    await asyncio.gather(*(asyncio.to_thread(pairs.restart, worker) for worker in workers))
    await whole_again(pairs, wave)


# The same with requests of every kind is in test_faults_resume.py, not full.
@pytest.mark.full
async def test_begun_requests_go_on_when_the_last_decode_instances_come_back(pairs, wave):
    # A request of which its caller has tokens waits longer for workers than a new one.
    async with wave(output_tokens=600) as disturbed:
        await disturbed.until_tokens(200, each=1)
        for worker in ("decode-1", "decode-2"):
            pairs.kill(worker)
        await asyncio.gather(*(asyncio.to_thread(pairs.restart, name) for name in ("decode-1", "decode-2")))
    disturbed.check_whole()
    await whole_again(pairs, wave)
