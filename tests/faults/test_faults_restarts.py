"""The same fault again and again: nothing piles up anywhere, and every process finds everybody each time."""

import asyncio
import json
import signal
from urllib.request import urlopen

import psutil
import pytest
from faults.wave import run_whole, until_all_are_routable, whole_again

from tidemill_local import servers
from tidemill_local.ports import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

WORKER_KILLS = 20
SERVICE_RESTARTS = 10
SERVER_RESTARTS = 10
FRONT_RESTARTS = 5
# Threads and sockets of a process that are idle or closing at the moment of the count.
SLACK = 6
WATCHED = ("router-1", "gateway-1", "gateway-2", "prefill-1", "kvstore-1")


def sizes(cluster):
    """Threads and file descriptors by instance."""
    processes = {name: psutil.Process(cluster.cluster.record(name).pid) for name in WATCHED}
    return {name: (process.num_threads(), process.num_fds()) for name, process in processes.items()}


def check_not_grown(before, after):
    for name, (threads, files) in after.items():
        assert threads <= before[name][0] + SLACK, f"{name}: {before[name][0]} threads became {threads}"
        assert files <= before[name][1] + SLACK, f"{name}: {before[name][1]} files became {files}"


async def test_a_worker_killed_twenty_times_leaves_nothing_behind(pairs, wave):
    await whole_again(pairs, wave)
    before = sizes(pairs)
    for _ in range(WORKER_KILLS):
        async with wave(streams=4) as disturbed:
            await disturbed.until_tokens(1)
            pairs.kill("decode-2")
            await asyncio.to_thread(pairs.restart, "decode-2")
        disturbed.check_whole()
    await whole_again(pairs, wave)
    await until_all_are_routable(pairs)
    check_not_grown(before, sizes(pairs))


async def test_router_and_gateway_killed_five_times_find_all_workers_each_time(pairs, wave):
    for _ in range(FRONT_RESTARTS):
        for name in ("router-1", "gateway-1"):
            pairs.kill(name)
        await asyncio.gather(*(asyncio.to_thread(pairs.restart, name) for name in ("router-1", "gateway-1")))
        await until_all_are_routable(pairs)
        async with pairs.client() as client:
            assert all(model.ready for model in await client.models())
        await run_whole(wave(streams=4, output_tokens=20))
    await whole_again(pairs, wave)


@pytest.mark.parametrize("server", ["nats", "etcd"])
async def test_a_server_killed_ten_times_costs_no_thread_and_no_connection(pairs, wave, server):
    await whole_again(pairs, wave)
    before = sizes(pairs)
    for _ in range(SERVER_RESTARTS):
        async with wave(streams=4) as disturbed:
            await disturbed.until_tokens(1)
            pairs.kill(server)
            await asyncio.to_thread(pairs.restart, server)
        disturbed.check_whole()
    await whole_again(pairs, wave)
    await until_all_are_routable(pairs)
    check_not_grown(before, sizes(pairs))


async def test_restarted_services_leave_no_subscription_in_nats(pairs, wave):
    port = free_port()
    plain = pairs.kill("nats").argv
    servers.launch("nats", [*plain, "--http_port", str(port)], pairs.home)

    def counts():
        with urlopen(f"http://127.0.0.1:{port}/varz", timeout=10) as response:
            said = json.load(response)
        return said["connections"], said["subscriptions"]

    async def settled():
        """What NATS counts once nothing is coming or going."""
        await whole_again(pairs, wave)
        while (first := counts()) != (await asyncio.sleep(2.0) or counts()):
            pass
        return first

    before = await settled()
    names = [name for _, name in pairs.spec.instances()]
    for _ in range(SERVICE_RESTARTS):
        for name in names:
            pairs.kill(name, signal.SIGKILL)
        await asyncio.gather(*(asyncio.to_thread(pairs.restart, name) for name in names))
    assert await settled() == before

    pairs.kill("nats")
    servers.launch("nats", plain, pairs.home)
    await whole_again(pairs, wave)
