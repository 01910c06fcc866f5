"""SIGSTOP under load: as good as dead while it lasts, harmless when it goes on."""

import asyncio
import json
import os
import random
import signal
import sys

import pytest
from faults.seen import Watch
from faults.wave import run_whole, whole_again, worker_fault

# The first test's time includes the start of a cluster.
FROZEN_CLIENT = """
import asyncio, json, sys
from tidemill.client import Client

async def main():
    endpoint, model, prompt = json.loads(sys.argv[1])
    async with Client(endpoint) as client:
        stream = client.generate(model=model, token_ids=prompt, max_tokens=400, temperature=0.0, ignore_eos=True)
        tokens = []
        async for response in stream:
            tokens += [token for delta in response.choices for token in delta.token_ids]
            print("reads", flush=True) if len(tokens) < 5 else None
    print(json.dumps(tokens))

asyncio.run(main())
"""


def liveness_s(cluster) -> float:
    return float(cluster.spec.settings["all"]["liveness_s"])


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.full)])
async def test_a_frozen_worker_is_left_and_may_come_back(pairs, wave, role):
    seen = Watch(pairs)
    async with worker_fault(wave, pairs, role) as victim:
        pairs.kill(victim, signal.SIGSTOP)
    await seen.assert_loss_of(victim)
    pairs.kill(victim, signal.SIGCONT)
    await whole_again(pairs, wave)


@pytest.mark.full
async def test_a_client_that_stood_still_goes_on_where_it_was(pairs, oracle):
    [prompt], expected = oracle.cases("a client that stood still", 1, 300, 400)
    arguments = json.dumps([pairs.grpc, pairs.model, prompt])
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN_CLIENT, arguments, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    await client.stdout.readline()
    os.kill(client.pid, signal.SIGSTOP)
    await asyncio.sleep(3 * liveness_s(pairs))
    os.kill(client.pid, signal.SIGCONT)
    said, _ = await client.communicate()
    assert client.returncode == 0
    assert [json.loads(said.splitlines()[-1])] == expected
    await pairs.holds_are_zero()


@pytest.mark.parametrize(
    ("victim", "after_tokens"),
    [
        pytest.param("router-1", 20, marks=pytest.mark.full),
        pytest.param("kvstore-1", 1, marks=pytest.mark.full),
        pytest.param("autoscaler-1", 100, marks=pytest.mark.full),
        ("nats", 20),
        pytest.param("etcd", 20, marks=pytest.mark.full),
    ],
)
async def test_a_frozen_process_costs_a_pause_and_no_token(pairs, wave, victim, after_tokens):
    seen = Watch(pairs)
    async with wave() as disturbed:
        await disturbed.until_tokens(after_tokens)
        pairs.kill(victim, signal.SIGSTOP)
    disturbed.check_whole()
    await run_whole(wave(streams=4, output_tokens=20))
    await seen.assert_loss_of(victim)
    pairs.kill(victim, signal.SIGCONT)
    await whole_again(pairs, wave)


@pytest.mark.parametrize(
    ("instance", "after_tokens"), [("decode-2", 200), pytest.param("prefill-2", 1, marks=pytest.mark.full)]
)
async def test_a_frozen_rank_is_replaced_and_costs_no_token(pairs, wave, instance, after_tokens):
    [before], seen = pairs.rank_pids(instance), Watch(pairs)
    async with wave() as disturbed:
        await disturbed.until_tokens(after_tokens)
        pairs.kill_rank(instance, signum=signal.SIGSTOP)
    disturbed.check_whole()
    await seen.assert_seen("rank frozen")
    while before in pairs.rank_pids(instance):
        await asyncio.sleep(0.1)
    await whole_again(pairs, wave)


@pytest.mark.full
async def test_a_frozen_gateway_keeps_its_clients(pairs, wave):
    seen = Watch(pairs)
    async with wave(output_tokens=400) as disturbed:
        await disturbed.until_tokens(400)
        pairs.kill("gateway-1", signal.SIGSTOP)
        await asyncio.sleep(3 * liveness_s(pairs))
        pairs.kill("gateway-1", signal.SIGCONT)
    disturbed.check_whole()
    await seen.assert_seen("gateway frozen")
    await whole_again(pairs, wave)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
async def test_kills_and_freezes_at_random_moments_cost_no_token(pairs, wave, seed):
    """One fault after another, restarts under load: each meets requests at another stage."""
    choices = random.Random(seed)
    # A killed gateway's own streams end; that has its own test.
    names = [name for service, name in pairs.spec.instances() if service != "gateway"] + ["nats", "etcd"]
    for _ in range(8):
        victim, freezes = choices.choice(names), choices.random() < 0.3
        async with wave() as disturbed:
            await disturbed.until_tokens(choices.randrange(1, 800))
            pairs.kill(victim, signal.SIGSTOP if freezes else signal.SIGKILL)
            if freezes:
                await asyncio.sleep(choices.uniform(0.1, 3 * liveness_s(pairs)))
                pairs.kill(victim, signal.SIGCONT)
            else:
                await asyncio.to_thread(pairs.restart, victim)
        disturbed.check_whole()
    await whole_again(pairs, wave)
