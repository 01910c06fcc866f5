"""Long sessions come back from disk and get their own KV: L1 and L2 hold a few of forty, kvstore all of them."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from harness.fixtures import kept
from harness.running import RunningCluster
from integration.reference import FP32_BOUND, prompt_of

from tidemill.client import Client
from tidemill.completion import CompletedChoice, Completion

pytestmark = pytest.mark.full

BLOCK = 16
SESSIONS, FACT_TOKENS, TURN_TOKENS, OUTPUT = 40, 12 * BLOCK, 20, 6
L1_BLOCKS, L2_BLOCKS = 72, 24
# Under a tenant of its own each prompt is computed from nothing: caches are kept apart, and usage shows it.
WARM, COLD = "sk-warm", "sk-cold"
# Of the tiny checkpoint: 2 layers, K and V, 2 heads of 16 in fp32.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
AT_ONCE = 4
DAMAGE_STRIDE_BYTES = 40_000
WORKER = {
    "block_size": BLOCK,
    "num_blocks": L1_BLOCKS,
    "l2_memory_bytes": L2_BLOCKS * BLOCK_BYTES,
    "l3_policy": "write_through",
    "peer_fetch": False,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "onboard_min_blocks": 1,
    # What is quicker depends on the machine; that what is stored is the session's own does not.
    "onboard_choice": "always",
    "onboard_deadline_s": 60.0,
}


@pytest.fixture(scope="module")
def mesh(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill, one decode, one kvstore; two tenants."""
    keys = tmp_path_factory.mktemp("keys") / "api_keys"
    keys.write_text(f"{WARM} warm\n{COLD} cold\n")
    settings = {"gateway": {"api_keys_file": str(keys)}, "prefill": WORKER, "decode": WORKER}
    made = RunningCluster.start(checkpoint("llama"), autoscalers=0, settings=settings)
    with kept(made):
        yield made


class Asker:
    """Asks for greedy answers, a few at a time."""

    def __init__(self, mesh: RunningCluster, warm: Client, cold: Client) -> None:
        self._mesh, self._clients = mesh, {WARM: warm, COLD: cold}
        self._places = asyncio.Semaphore(AT_ONCE)

    async def ask(self, prompt: Sequence[int], key: str = WARM) -> Completion:
        async with self._places:
            return await self._clients[key].complete(
                model=self._mesh.model,
                token_ids=prompt,
                max_tokens=OUTPUT,
                temperature=0.0,
                ignore_eos=True,
                logprobs=True,
            )

    async def ask_all(self, prompts: Sequence[Sequence[int]], key: str = WARM) -> list[Completion]:
        return list(await asyncio.gather(*(self.ask(prompt, key) for prompt in prompts)))


def same(warm: CompletedChoice, cold: CompletedChoice) -> bool:
    """The same tokens, as likely as in the cold run."""
    off = [abs(a.logprob - b.logprob) for a, b in zip(warm.logprobs, cold.logprobs, strict=True)]
    return warm.token_ids == cold.token_ids and max(off) <= FP32_BOUND


async def stored_blocks(mesh: RunningCluster) -> int:
    """Blocks in kvstore."""
    return int((await mesh.look()).members["kvstore-1"].status.blocks)


async def damaged_blocks(mesh: RunningCluster) -> int:
    """Blocks that kvstore found damaged."""
    return int((await mesh.look()).members["kvstore-1"].status.counters.get("damaged_blocks", 0))


def damage(mesh: RunningCluster) -> None:
    """Changes a byte here and there, in a part of all blocks."""
    for path in mesh.home.data.glob("kvstore-*/*.segment"):
        with path.open("r+b") as segment:
            for offset in range(DAMAGE_STRIDE_BYTES // 2, path.stat().st_size, DAMAGE_STRIDE_BYTES):
                segment.seek(offset)
                byte = segment.read(1)
                segment.seek(offset)
                segment.write(bytes([byte[0] ^ 1]))


async def test_every_session_gets_its_own_kv_back_from_disk_also_when_some_of_it_is_damaged(
    mesh: RunningCluster,
) -> None:
    drawn = random.Random("order of return")
    facts = [prompt_of(f"the fact of session {i}", FACT_TOKENS) for i in range(SESSIONS)]
    async with Client(mesh.grpc, WARM) as warm, Client(mesh.grpc, COLD) as cold:
        asker = Asker(mesh, warm, cold)
        histories = []
        for at in range(0, SESSIONS, AT_ONCE):
            answers = await asker.ask_all(facts[at : at + AT_ONCE])
            histories += [fact + a.choices[0].token_ids for fact, a in zip(facts[at:], answers, strict=False)]
            # What leaves L1 before it is written down would be computed again: right, but no test of the disk.
            await mesh.holds_are_zero()
        assert await stored_blocks(mesh) >= SESSIONS * FACT_TOKENS // BLOCK

        returning = [history + prompt_of(f"turn of {i}", TURN_TOKENS) for i, history in enumerate(histories)]
        short = [prompt_of(f"short {i}", drawn.randrange(3, 40)) for i in range(SESSIONS)]
        order = drawn.sample(range(2 * SESSIONS), 2 * SESSIONS)
        prompts = [(returning + short)[i] for i in order]
        found = await asker.ask_all(prompts)
        expected = await asker.ask_all(prompts, COLD)
        assert {a.usage.cached_tokens_l1 + a.usage.cached_tokens_l2 + a.usage.cached_tokens_l3 for a in expected} == {0}
        wrong = [i for i, a, b in zip(order, found, expected, strict=True) if not same(a.choices[0], b.choices[0])]
        assert not wrong, f"not as in their cold runs: {wrong}"
        from_disk = [a.usage.cached_tokens_l3 for i, a in zip(order, found, strict=True) if i < SESSIONS]
        # The last few may still have been above it.
        assert sum(tokens > 0 for tokens in from_disk) >= SESSIONS - (L1_BLOCKS + L2_BLOCKS) * BLOCK // FACT_TOKENS
        assert await damaged_blocks(mesh) == 0

        await mesh.holds_are_zero()
        await asyncio.to_thread(damage, mesh)
        again = await asker.ask_all(prompts)
        wrong = [i for i, a, b in zip(order, again, expected, strict=True) if not same(a.choices[0], b.choices[0])]
        assert not wrong, f"not as in their cold runs, with damaged blocks on disk: {wrong}"
        assert await damaged_blocks(mesh) > 0
        computed = sum(a.usage.prompt_tokens - a.usage.cached_tokens_l1 - a.usage.cached_tokens_l2
                       - a.usage.cached_tokens_l3 for a in again)  # fmt: skip
        assert computed > 2 * SESSIONS * BLOCK
        await mesh.holds_are_zero()
