"""Tenants' limits over two gateways, and their weights in the order in which a prefill engine computes prompts."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from harness.fixtures import kept
from harness.oracle import prompts_of
from harness.running import RunningCluster

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.v1.errors_pb2 import ERROR_CODE_RESOURCE_EXHAUSTED

pytestmark = pytest.mark.full

PROMPTS = 40
PROMPT_TOKENS = 700
WEIGHTS = {"gold": 4.0, "base": 1.0}
METERED = "tokens_per_minute = 60"
REQUESTS_PER_MINUTE = 6
LIMITS = {
    "metered": METERED,
    "early": METERED,
    "indebted": METERED,
    "single": "concurrent_requests = 1",
    "paced": f"requests_per_minute = {REQUESTS_PER_MINUTE}",
}
PREFILL = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "tenant_burst_s": 0.02}
PATIENCE_S = 180.0
DEBT_S = 120.0
"""Far more than a tenant would wait for what it has used at one gateway alone by small requests."""


@pytest.fixture(scope="module")
def mesh(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two gateways with the same tenants."""
    folder = tmp_path_factory.mktemp("tenants")
    keys, limits = folder / "keys", folder / "tenants.toml"
    tables = {**{tenant: f"weight = {weight}" for tenant, weight in WEIGHTS.items()}, **LIMITS}
    keys.write_text("".join(f"key-of-{tenant} {tenant}\n" for tenant in tables))
    limits.write_text("".join(f"[tenants.{tenant}]\n{table}\n" for tenant, table in tables.items()))
    gateway = {"api_keys_file": str(keys), "tenant_limits_file": str(limits)}
    settings = {"gateway": gateway, "prefill": PREFILL}
    made = RunningCluster.start(checkpoint("llama"), gateways=2, autoscalers=0, settings=settings)
    with kept(made):
        yield made


def client_of(mesh: RunningCluster, tenant: str, gateway: str = "gateway-1") -> Client:
    return Client(mesh.cluster.endpoint(gateway), api_key=f"key-of-{tenant}")


async def ask(mesh: RunningCluster, client: Client, prompt: list[int], max_tokens: int) -> TidemillError | None:
    """Runs a request to its end; returns why it was refused for its tenant, None if it was served."""
    try:
        await client.complete(
            model=mesh.model, token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
    except TidemillError as error:
        if error.code != ERROR_CODE_RESOURCE_EXHAUSTED:
            raise
        return error
    return None


async def refused_for_the_other(mesh: RunningCluster) -> TidemillError:
    """Keeps a tenant's one request at once running at the first gateway until the second one refuses another for it."""
    [prompt], over = prompts_of("single", 1, 20), asyncio.Event()

    async def occupy(client: Client) -> None:
        while not over.is_set():
            await ask(mesh, client, prompt, 400)

    async with client_of(mesh, "single") as one, client_of(mesh, "single", "gateway-2") as two:
        occupied = asyncio.create_task(occupy(one))
        try:
            async with asyncio.timeout(PATIENCE_S):
                # One at a time, so nothing that runs at its own gateway can be why.
                while (refused := await ask(mesh, two, prompt, 1)) is None:
                    await asyncio.sleep(0.05)
        finally:
            over.set()
            await occupied
    return refused


async def test_a_request_at_one_gateway_keeps_out_another_at_the_other_while_it_runs(mesh: RunningCluster) -> None:
    assert (await refused_for_the_other(mesh)).limit == "1 requests at once"
    [prompt] = prompts_of("single again", 1, 20)
    async with client_of(mesh, "single", "gateway-2") as client, asyncio.timeout(PATIENCE_S):
        while await ask(mesh, client, prompt, 1) is not None:
            await asyncio.sleep(0.05)
    await mesh.holds_are_zero()


async def test_tokens_used_at_one_gateway_are_missing_at_the_other(mesh: RunningCluster) -> None:
    small, large = prompts_of("small", 1, 1)[0], prompts_of("large", 1, PROMPT_TOKENS)[0]
    async with AsyncExitStack() as stack:
        clients = [client_of(mesh, "metered", gateway) for gateway in ("gateway-1", "gateway-2")]
        one, two = [await stack.enter_async_context(client) for client in clients]
        other = await stack.enter_async_context(client_of(mesh, "gold", "gateway-2"))
        # Ten times the budget of a minute: nobody knows what a request will have used when it begins.
        assert await ask(mesh, one, large, 1) is None
        # Until it has heard of it, its own small requests may be too many, which is forgiven long before.
        assert (await until_indebted(mesh, two)).limit == "60 tokens a minute"
        assert await ask(mesh, one, small, 1) is not None
        assert await ask(mesh, other, small, 1) is None, "others are not concerned"
    await mesh.holds_are_zero()


async def until_indebted(mesh: RunningCluster, client: Client) -> TidemillError:
    """Waits until a gateway refuses small requests for what only another one has seen; returns its refusal."""
    [small] = prompts_of("small", 1, 1)
    async with asyncio.timeout(PATIENCE_S):
        while (refused := await ask(mesh, client, small, 1)) is None or refused.retry_after_s < DEBT_S:
            await asyncio.sleep(0.05)
    return refused


async def test_tokens_used_in_a_gateways_first_moments_are_missing_at_the_other(mesh: RunningCluster) -> None:
    [large] = prompts_of("large", 1, PROMPT_TOKENS)
    await asyncio.to_thread(mesh.replace, "gateway-2")
    async with client_of(mesh, "early") as one, client_of(mesh, "early", "gateway-2") as new:
        assert await ask(mesh, new, large, 1) is None
        await until_indebted(mesh, one)
    await mesh.holds_are_zero()


async def test_tokens_used_before_a_gateway_began_are_missing_at_it(mesh: RunningCluster) -> None:
    [large] = prompts_of("large", 1, PROMPT_TOKENS)
    async with client_of(mesh, "indebted") as one:
        assert await ask(mesh, one, large, 1) is None
    await asyncio.to_thread(mesh.replace, "gateway-2")
    async with client_of(mesh, "indebted", "gateway-2") as new:
        await until_indebted(mesh, new)
    await mesh.holds_are_zero()


async def until_refused(mesh: RunningCluster, tenant: str, gateway: str) -> int:
    """How many requests of a tenant a gateway serves before it refuses one."""
    [prompt], served = prompts_of("paced", 1, 1), 0
    async with client_of(mesh, tenant, gateway) as client, asyncio.timeout(PATIENCE_S):
        while (refused := await ask(mesh, client, prompt, 1)) is None:
            served += 1
    assert refused.limit == f"{REQUESTS_PER_MINUTE} requests a minute"
    return served


async def test_requests_served_at_one_gateway_are_missing_at_the_other(mesh: RunningCluster) -> None:
    began_s = time.monotonic()
    served = await until_refused(mesh, "paced", "gateway-1")
    assert served >= REQUESTS_PER_MINUTE
    # Words come in their order: with this one the other gateway has heard of all that.
    await refused_for_the_other(mesh)
    served += await until_refused(mesh, "paced", "gateway-2")
    # Two gateways that did not hear each other would serve as many again.
    assert served <= REQUESTS_PER_MINUTE * (1 + (time.monotonic() - began_s) / 60)
    await mesh.holds_are_zero()


async def test_of_two_tenants_that_want_the_same_the_heavier_one_is_served_first(mesh: RunningCluster) -> None:
    done: list[str] = []

    async def one(client: Client, tenant: str, prompt: list[int]) -> None:
        async for _ in client.generate(model=mesh.model, token_ids=prompt, max_tokens=1, temperature=0.0):
            pass
        done.append(tenant)

    clients = {tenant: client_of(mesh, tenant) for tenant in WEIGHTS}
    tenants = [tenant for _ in range(PROMPTS) for tenant in WEIGHTS]
    prompts = prompts_of("tenant weights", len(tenants), PROMPT_TOKENS)
    await asyncio.gather(*(one(clients[t], t, list(p)) for t, p in zip(tenants, prompts, strict=True)))
    for client in clients.values():
        await client.close()
    # By weight four of five; without weights it would be every second.
    assert done[:PROMPTS].count("gold") > 0.65 * PROMPTS, done
    await mesh.holds_are_zero()
