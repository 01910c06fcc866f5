"""Membership goes wrong while the processes are well: leases end, etcd forgets, a successor takes an old address."""

import asyncio
import shutil

import pytest
from faults.membership import PATIENCE_S, end_lease
from faults.seen import Watch
from faults.wave import run_whole, until_all_are_routable, whole_again, worker_fault
from harness.proxy import Proxy

from tidemill_local.ports import free_port

# The first test's time includes the start of a cluster.
ROUNDS = 3
"""A worker that a busy machine did not run for liveness_s is left by its streams, whatever its lease."""


async def test_an_ended_lease_costs_a_living_decode_instance_no_stream(pairs, wave):
    seen = Watch(pairs)
    for _ in range(ROUNDS):
        async with wave(output_tokens=600) as disturbed:
            await disturbed.until_tokens(200)
            await end_lease(pairs, "decode", "decode-1")
        disturbed.check_whole()
        if {stream.attempts for stream in disturbed.streams} == {1}:
            break
    await seen.assert_seen("lease ended, process alive")
    assert {stream.attempts for stream in disturbed.streams} == {1}, "no stream may notice"
    await whole_again(pairs, wave)


@pytest.mark.full
@pytest.mark.parametrize("instance", ["prefill-1", "router-1", "kvstore-1", "gateway-1", "autoscaler-1"])
async def test_an_ended_lease_costs_no_token(pairs, wave, instance):
    async with wave() as disturbed:
        await disturbed.until_tokens(1)
        await end_lease(pairs, instance.partition("-")[0], instance)
    disturbed.check_whole()
    await whole_again(pairs, wave)


async def test_an_etcd_that_lost_all_its_data_costs_no_token(pairs, wave):
    async with wave(output_tokens=300) as disturbed:
        await disturbed.until_tokens(200)
        pairs.kill("etcd")
        shutil.rmtree(pairs.home.data / "etcd")
        await asyncio.to_thread(pairs.restart, "etcd")
    disturbed.check_whole()
    await whole_again(pairs, wave)


@pytest.mark.full
@pytest.mark.parametrize("instance", ["decode-1", "prefill-1"])
async def test_a_worker_that_only_etcd_has_lost_goes_on_and_registers_again(pairs, wave, instance):
    plain = pairs.cluster.record(instance).argv
    async with Proxy(pairs.etcd) as line:
        behind = [f"--etcd={line.address}" if argument.startswith("--etcd=") else argument for argument in plain]
        await asyncio.to_thread(pairs.replace, instance, behind)
        await whole_again(pairs, wave)
        before = (await pairs.look()).members[instance].record.incarnation
        async with wave(output_tokens=600) as disturbed:
            await disturbed.until_tokens(200)
            line.cut()
            async with asyncio.timeout(PATIENCE_S):
                while instance in (await pairs.look()).members:
                    await asyncio.sleep(0.2)
        disturbed.check_whole()
        assert {stream.attempts for stream in disturbed.streams} == {1}, "no stream may notice"
        await run_whole(wave(streams=4, output_tokens=20))
        line.mend()
        await whole_again(pairs, wave)
        assert (await pairs.look()).members[instance].record.incarnation != before
        await asyncio.to_thread(pairs.replace, instance, plain)
    await whole_again(pairs, wave)


@pytest.mark.parametrize(
    ("role", "also_idle"), [("decode", False), pytest.param("prefill", True, marks=pytest.mark.full)]
)
async def test_a_worker_killed_and_started_again_at_its_old_address_costs_an_attempt_and_no_token(
    pairs, wave, role, also_idle
):
    victim = f"{role}-1"
    plain = pairs.cluster.record(victim).argv
    # No port that an outgoing connection may be given while the worker is away.
    pinned = [*plain, f"--port={free_port()}", f"--stream-port={free_port()}"]
    await asyncio.to_thread(pairs.replace, victim, pinned)
    await until_all_are_routable(pairs)
    everybody = [name for _, name in pairs.spec.instances()]
    view, seen = await pairs.until_members(*everybody), Watch(pairs)
    record = view.members[victim].record
    async with worker_fault(wave, pairs, role, victim):
        pairs.kill(victim)
        # At once, under load: streams and channels of the dead one meet the new one.
        await asyncio.to_thread(pairs.restart, victim)
    await seen.assert_seen("worker back at once, at its old address")
    await whole_again(pairs, wave)
    if also_idle:
        pairs.kill(victim)
        await asyncio.to_thread(pairs.restart, victim)
        await run_whole(wave(streams=8, output_tokens=20))
        await whole_again(pairs, wave)
    again = (await pairs.until_members(*everybody)).members[victim].record
    assert (again.endpoint, again.stream_endpoint) == (record.endpoint, record.stream_endpoint)
    assert again.incarnation != record.incarnation
    await asyncio.to_thread(pairs.replace, victim, plain)
    await until_all_are_routable(pairs)
