"""Running requests move, with KV and sampler state, to another decode instance: at no attempt, without a change."""

import asyncio
import signal

import pytest
from faults.stateful import REQUESTS, begin_all, check_same, run, stop_string_request
from faults.wave import busiest

from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local import processes

# The first test's time includes the start of a cluster.
pytestmark = pytest.mark.full

END_S = 180.0


async def test_what_decodes_on_a_draining_instance_moves_with_all_its_state(pairs):
    async with pairs.client() as client:
        requests = [*REQUESTS.values(), await stop_string_request(pairs, client)]
        undisturbed = await asyncio.gather(*(run(pairs, client, options) for options in requests))
        running = await begin_all(pairs, client, requests)
        victim = await busiest(pairs, Role.ROLE_DECODE)
        assert not any(task.done() for task in running), "ended before the drain"
        drained = pairs.kill(victim, signal.SIGTERM)
        disturbed = await asyncio.gather(*running)

    assert await asyncio.to_thread(processes.wait_gone, drained, END_S)
    for options, got, right in zip(requests, disturbed, undisturbed, strict=True):
        assert got.placement.attempts == 1
        assert got.placement.decode_instance != victim
        check_same(got, right, options)
    assert "offered to other instances" in pairs.log(victim, lines=400)
    await asyncio.to_thread(pairs.restart, victim)
    await pairs.until_members(*(name for _, name in pairs.spec.instances()))
    await pairs.holds_are_zero(within_s=90.0)
