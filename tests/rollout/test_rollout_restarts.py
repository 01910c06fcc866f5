"""Every service is replaced in turn while requests run: none fails or hangs, no token is lost, changed or doubled."""

import asyncio
import os
import subprocess
import sys

import pytest
from harness.pairs import GATEWAYS
from harness.steady import SteadyLoad

from tidemill_local import processes

pytestmark = pytest.mark.full

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 100
CASES = 24
DRAINED_S = 120.0


@pytest.fixture
def load(pairs, oracle, request):
    cases = oracle.cases(request.node.name, CASES, PROMPT_TOKENS, OUTPUT_TOKENS)
    return SteadyLoad(pairs, *cases, gateways=GATEWAYS)


async def replace_in_turn(cluster, load, instances):
    """Replaces one after the other; each new process has served before the next old one goes."""
    everybody = [name for _, name in cluster.spec.instances()]
    async with load:
        await load.until_served(4)
        for instance in instances:
            await asyncio.to_thread(cluster.replace, instance)
            await cluster.until_members(*everybody)
            await load.until_served(4)
    await cluster.holds_are_zero()


async def test_every_service_is_replaced_in_its_turn_under_load(pairs, load):
    await replace_in_turn(pairs, load, [name for _, name in pairs.spec.instances()])


async def test_all_workers_but_one_of_a_kind_may_be_replaced_at_once(pairs, load):
    async with load:
        await load.until_served(4)
        await asyncio.gather(
            *(asyncio.to_thread(pairs.replace, name) for name in ("prefill-2", "decode-2", "router-1"))
        )
        await load.until_served(8)
    await pairs.holds_are_zero()


async def test_what_an_operator_drains_by_name_leaves_without_a_failed_request(pairs, load):
    env = {**os.environ, "TIDEMILL_HOME": str(pairs.home.root)}
    async with load:
        await load.until_served(4)
        for instance in ("decode-2", "gateway-2", "router-1"):
            record = pairs.cluster.record(instance)
            argv = [sys.executable, "-m", "tidemill_local", "drain", instance]
            done = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True)
            assert f"{instance} drains" in done.stdout, done.stderr
            assert await asyncio.to_thread(processes.wait_gone, record, DRAINED_S)
            await load.until_served(4)
            await asyncio.to_thread(pairs.restart, instance)
    await pairs.until_members(*(name for _, name in pairs.spec.instances()))
    await pairs.holds_are_zero()
