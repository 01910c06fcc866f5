"""Each process is killed, or stands still, while nothing runs: what comes afterwards is served as ever."""

import asyncio
import shutil
import signal
import time

import pytest
from faults.membership import end_lease
from faults.wave import run_whole, whole_again

PATIENCE_S = 180.0
OTHERS = ["decode-1", "router-1", "kvstore-1", "autoscaler-1", "gateway-1", "nats", "etcd"]


@pytest.mark.full
@pytest.mark.parametrize("victim", ["prefill-1", *OTHERS])
async def test_a_process_killed_in_idle_costs_the_next_requests_nothing(pairs, wave, victim):
    await pairs.holds_are_zero()
    pairs.kill(victim)
    await run_whole(wave(streams=8, output_tokens=20, gateways=["gateway-2"]))
    await asyncio.to_thread(pairs.restart, victim)
    await whole_again(pairs, wave)


@pytest.mark.parametrize("victim", ["prefill-1", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
async def test_a_process_frozen_in_idle_costs_the_next_requests_nothing(pairs, wave, victim):
    await pairs.holds_are_zero()
    pairs.kill(victim, signal.SIGSTOP)
    await run_whole(wave(streams=8, output_tokens=20, gateways=["gateway-2"]))
    pairs.kill(victim, signal.SIGCONT)
    await whole_again(pairs, wave)


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["decode-1", "prefill-1"])
async def test_a_rank_lost_in_idle_is_replaced(pairs, wave, victim, signum):
    await pairs.holds_are_zero()
    lost = pairs.kill_rank(victim, signum=signum)
    await run_whole(wave(streams=8, output_tokens=20))
    end = time.monotonic() + PATIENCE_S
    while not pairs.rank_pids(victim) or lost in pairs.rank_pids(victim):
        assert time.monotonic() < end, "no new rank"
        await asyncio.sleep(0.1)
    await whole_again(pairs, wave)


@pytest.mark.full
@pytest.mark.parametrize("instance", ["decode-1", "prefill-1", "router-1", "kvstore-1", "autoscaler-1", "gateway-1"])
async def test_a_lease_that_ends_in_idle_costs_the_next_requests_nothing(pairs, wave, instance):
    await pairs.holds_are_zero()
    await end_lease(pairs, instance.partition("-")[0], instance)
    await whole_again(pairs, wave)


@pytest.mark.full
async def test_an_etcd_that_loses_all_its_data_in_idle_costs_the_next_requests_nothing(pairs, wave):
    await pairs.holds_are_zero()
    pairs.kill("etcd")
    shutil.rmtree(pairs.home.data / "etcd")
    await asyncio.to_thread(pairs.restart, "etcd")
    await whole_again(pairs, wave)
