"""Real overload: degraded steps go on, are seen, and end by themselves; what KV memory does not hold moves or ends."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from faults.seen import Watch
from faults.stateful import check_same
from faults.wave import until_all_are_routable
from harness.fixtures import kept
from harness.oracle import Oracle, prompts_of
from harness.running import RunningCluster
from harness.streams import Stream

from tidemill.completion import Completion
from tidemill.errors import TidemillError
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill.v1 import errors_pb2
from tidemill_local import processes
from tidemill_local.status import render

pytestmark = pytest.mark.full

POOL_TOKENS = 1600
"""Of each decode instance."""
CONTEXT_TOKENS = 2048
"""Of the model: more than a pool."""
TOKEN_BYTES = 512
"""Of KV in the tiny Llama."""
SETTINGS = {
    # Any queue is late, and prompts take several steps.
    "prefill": {"slo_ttft_s": 0.01, "max_num_batched_tokens": 64},
    # The pool is for requests alone: copies to other tiers keep blocks for as long as a slow machine takes.
    "decode": {
        "kv_memory_bytes": POOL_TOKENS * TOKEN_BYTES,
        "kv_high_water": 0.3,
        "l2_memory_bytes": 0,
        "peer_fetch": False,
    },
}
PATIENCE_S = 120.0
"""For a machine that does other things."""
CLASS_OUTPUTS = 20
"""Past outputs from which on lengths of a class, one priority, are known."""


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a longer context."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
    return folder


@pytest.fixture(scope="module")
def mesh(model: Path) -> Iterator[RunningCluster]:
    """Each test leaves it as it was."""
    made = RunningCluster.start(model, decode=2, kvstores=0, autoscalers=0, settings=SETTINGS)
    with kept(made):
        yield made


async def ask(mesh: RunningCluster, client: Any, prompt: list[int], **options: Any) -> Completion:
    return await client.complete(
        model=mesh.model, token_ids=prompt, ignore_eos=True, include_placement=True, timeout_s=PATIENCE_S, **options
    )


@asynccontextmanager
async def load(mesh: RunningCluster, prompts: list[list[int]], **options: Any) -> AsyncIterator[list[Completion]]:
    """As many requests at a time as there are prompts, each of them again and again, until the block is left."""
    answers: list[Completion] = []
    ending = asyncio.Event()

    async def lane(client: Any, prompt: list[int]) -> None:
        turn = 0
        while not ending.is_set():
            turn += 1
            # A new beginning: nothing of the prompt is cached.
            answers.append(await ask(mesh, client, [turn % 256, turn // 256, *prompt], **options))

    async with mesh.client() as client, asyncio.TaskGroup() as lanes:
        for prompt in prompts:
            lanes.create_task(lane(client, prompt))
        try:
            yield answers
        finally:
            ending.set()


def metrics_of(mesh: RunningCluster, instance: str) -> list[str]:
    with urlopen(f"http://{mesh.cluster.http_endpoint(instance)}/metrics", timeout=300) as response:
        text: str = response.read().decode()
    return text.splitlines()


async def degraded(mesh: RunningCluster, step: str) -> set[str]:
    """Instances at which the step is on, as `tidemill status` shows them."""
    lines = render(await mesh.look()).splitlines()
    return {line.split()[0] for line in lines if "degraded: " in line and step in line}


async def until(condition: Callable[[], Any]) -> Any:
    """Waits for what is not empty."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await condition()):
            await asyncio.sleep(0.1)
    return found


async def shows(mesh: RunningCluster, instance: str, line: str) -> bool:
    return line in await asyncio.to_thread(metrics_of, mesh, instance)


async def until_off(mesh: RunningCluster, step: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await degraded(mesh, step):
            await asyncio.sleep(0.1)


async def test_prompts_get_small_chunks_while_tokens_come_late_and_no_token_changes(mesh):
    prompts = prompts_of("small chunks", 6, 40)
    gauge = 'tidemill_decode_degraded{domain="0",step="small_chunks"}'
    async with load(mesh, prompts, temperature=0.0, max_tokens=120, tpot_s=1e-4) as answers:
        [victim, *_] = await until(lambda: degraded(mesh, "small_chunks"))
        await until(lambda: shows(mesh, victim, f"{gauge} 1.0"))
    assert all(len(answer.choices[0].token_ids) == 120 for answer in answers)
    await until_off(mesh, "small_chunks")
    await until(lambda: shows(mesh, victim, f"{gauge} 0.0"))
    await mesh.holds_are_zero()


async def test_while_prefill_is_late_decode_computes_prompts_and_low_classes_are_refused(mesh):
    prompts = prompts_of("local prefill", 24, 300)
    gauge, shed = 'tidemill_router_degraded{step="local_prefill"}', 'tidemill_gateway_degraded{step="shed_low"}'
    async with load(mesh, prompts, temperature=0.0, max_tokens=2) as answers:
        assert await until(lambda: degraded(mesh, "shed_low")) == {"gateway-1"}
        await until(lambda: shows(mesh, "gateway-1", f"{shed} 1.0"))
        refused = await until(lambda: refusal(mesh, priority=-1))
        assert await until(lambda: degraded(mesh, "local_prefill")) == {"router-1"}
        await until(lambda: shows(mesh, "router-1", f"{gauge} 1.0"))
        await until(lambda: computed_by_decode(answers))
    assert (refused.code, refused.field) == (errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "priority")
    assert refused.retry_after_s >= 1
    for step in ("local_prefill", "shed_low"):
        await until_off(mesh, step)
    await until(lambda: shows(mesh, "router-1", f"{gauge} 0.0"))
    await until(lambda: shows(mesh, "gateway-1", f"{shed} 0.0"))
    async with mesh.client() as client:
        later = await ask(mesh, client, prompts_of("later", 1, 300)[0], max_tokens=2, priority=-1)
    assert later.placement.prefill_instance == "prefill-1"
    await mesh.holds_are_zero()


async def computed_by_decode(answers: list[Completion]) -> list[Completion]:
    return [answer for answer in answers if answer.placement.prefill_instance.startswith("decode-")]


async def refusal(mesh: RunningCluster, **options: Any) -> TidemillError | None:
    """Why a request is refused now, None if it is served."""
    async with mesh.client() as client:
        try:
            await ask(mesh, client, prompts_of("refusal", 1, 20)[0], max_tokens=1, **options)
        except TidemillError as error:
            return error
    return None


async def test_an_output_that_outgrows_every_pool_ends_with_the_limit_and_all_its_tokens_so_far(mesh, model):
    [prompt], [expected] = Oracle(model).cases("outgrown", 1, 40, POOL_TOKENS)
    async with mesh.client() as client:

        async def begun() -> tuple[Stream, asyncio.Task[None]] | None:
            """A stream that is under way; none while no gateway knows of a pool that could hold all of it."""
            stream = Stream("gateway-1", prompt, expected, PATIENCE_S)
            running = asyncio.create_task(stream.run(client, mesh.model))
            while not (stream.tokens or stream.ended):
                await asyncio.sleep(0.01)
            if stream.error is None:
                return stream, running
            assert (stream.error.code, stream.error.field, stream.error.limit) == (
                errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG,
                "sampling.max_tokens",
                f"{POOL_TOKENS} tokens",
            )
            return None

        assert await begun() is None
        # The pool that could have held it goes away again: the others are too small.
        large = mesh.add_worker("decode", "decode-3", kv_memory_bytes=2 * POOL_TOKENS * TOKEN_BYTES)
        try:
            await until_all_are_routable(mesh, "decode-3")
            stream, running = await until(begun)
        finally:
            mesh.kill("decode-3")
            processes.forget(large, mesh.home.run)
        await running
    stream.check_cut(errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED)
    assert stream.error.field == "sampling.max_tokens"
    assert stream.error.limit == f"{POOL_TOKENS} tokens"
    assert "outgrown the KV memory" in stream.error.message
    assert len(prompt) + len(stream.tokens) > POOL_TOKENS - 32
    await mesh.holds_are_zero()


async def test_a_runaway_moves_from_the_instance_that_fills_to_the_one_with_room_and_says_the_same(mesh):
    sampled = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    prompts = prompts_of("runaway", 3, 40)
    async with mesh.client() as client:

        async def answer(number: int, priority: int) -> Completion:
            options = {"seed": number, "priority": priority, "max_tokens": 400, **sampled}
            return await ask(mesh, client, prompts[number], **options)

        before, seen = await counted(mesh), Watch(mesh)
        undisturbed = [await answer(number, 0) for number in range(len(prompts))]
        assert (await counted(mesh))["moves_offered"] == before["moves_offered"], "one alone stays below the mark"
        async with asyncio.timeout(2 * PATIENCE_S):
            # Once is enough, unless the machine stood still in the moment in which there was room elsewhere. Each time
            # a class of its own, so that no earlier output has made long ones usual.
            for priority in range(1, 100):
                await teach_lengths(mesh, client, priority=priority, **sampled)
                disturbed = await asyncio.gather(*(answer(number, priority) for number in range(len(prompts))))
                for got, right in zip(disturbed, undisturbed, strict=True):
                    assert got.placement.attempts == 1
                    check_same(got, right, {})
                after = await counted(mesh)
                if after["moves_done"] > before["moves_done"]:
                    break
    assert after["moves_done"] > before["moves_done"]
    assert after["runaways"] > before["runaways"]
    await seen.assert_seen("decode instance out of KV memory")
    await mesh.holds_are_zero()


async def teach_lengths(mesh: RunningCluster, client: Any, **options: Any) -> None:
    """Asks until both decode instances have seen so many short outputs of the class that a long one is far past it."""
    seen = Counter[str]()
    while len(seen) < 2 or min(seen.values()) < CLASS_OUTPUTS:
        prompts = prompts_of(f"short/{seen.total()}", 8, 20)
        for short in await asyncio.gather(*(ask(mesh, client, prompt, max_tokens=4, **options) for prompt in prompts)):
            seen[short.placement.decode_instance] += 1


async def counted(mesh: RunningCluster) -> Counter[str]:
    """What decode instances count, together."""
    decodes = (await mesh.look()).with_role(Role.ROLE_DECODE)
    return sum((Counter(dict(member.status.counters)) for member in decodes), Counter())
