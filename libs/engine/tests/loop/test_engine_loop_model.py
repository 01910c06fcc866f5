"""The whole engine on tiny checkpoints against plain recompute: chunks, hits, preemption, hand-over."""

from collections.abc import Callable
from typing import Any

import pytest

from tidemill_engine.messages import ExportState, KVReady, RequestKey

ARCHITECTURES = ["llama", "toy"]
PROMPTS = [
    [(seed * 31 + 7 * i * i) % 250 for i in range(length)] for seed, length in enumerate([75, 130, 33, 64, 96, 1])
]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "seed": 11,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}


@pytest.fixture
def recompute(real_service: Callable[..., Any]) -> Callable[..., list[int]]:
    """Each token from a whole prompt computed anew in an engine that keeps nothing."""
    services: dict[str, Any] = {}

    def tokens(architecture: str, prompt: list[int], count: int, **sampling: Any) -> list[int]:
        if architecture not in services:
            services[architecture] = real_service(architecture)
        service = services[architecture]
        output: list[int] = []
        for _ in range(count):
            service.engine.cache.reset()
            key = RequestKey(f"{len(service.outputs)}")
            known = [*prompt, *output]
            service.submit("", known, key=key, prompt_tokens=len(prompt), max_tokens=len(output) + 1, **sampling)
            service.run()
            output += service.tokens(key)
        return output

    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("budget", [16, 512])
def test_a_mixed_batch_says_what_recompute_says(real_service, recompute, architecture, sampling, budget):
    service = real_service(architecture, max_num_batched_tokens=budget)
    keys = [service.submit(f"r{i}", prompt, max_tokens=12, **sampling) for i, prompt in enumerate(PROMPTS)]
    service.run()
    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert service.tokens(key) == recompute(architecture, prompt, 12, **sampling)
    service.assert_nothing_held()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_hit_says_what_a_cold_prompt_says(real_service, recompute, architecture):
    service = real_service(architecture)
    prompt = PROMPTS[1]
    first = service.submit("first", prompt, max_tokens=10, **GREEDY)
    service.run()
    turn = [*prompt, *service.tokens(first), *PROMPTS[2]]
    for name, again in (("same", prompt), ("turn", turn), ("block", prompt[:64]), ("one more", prompt[:65])):
        key = service.submit(name, again, max_tokens=10, **GREEDY)
        service.run()
        assert service.outputs[key][0].cached_l1 > 0 or name == "block"
        assert service.outputs[key][0].cached_l1 < len(again)
        assert service.tokens(key) == recompute(architecture, again, 10, **GREEDY)
    service.assert_nothing_held()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_output_in_half_the_pool_is_the_same(real_service, architecture, sampling):
    need = sum(-(-(len(prompt) + 47) // 16) for prompt in PROMPTS)
    outputs = []
    for num_blocks in (128, need // 2):
        service = real_service(architecture, num_blocks=num_blocks, admission_headroom_tokens=1)
        keys = [service.submit(f"r{i}", prompt, max_tokens=48, **sampling) for i, prompt in enumerate(PROMPTS)]
        service.run()
        outputs.append([service.tokens(key) for key in keys])
        assert (service.engine.scheduler.load_sample().preemptions_total > 0) == (num_blocks < need)
        service.assert_nothing_held()
    assert outputs[0] == outputs[1]


def hand_over(source: Any, target: Any, prompt: list[int], **sampling: Any) -> RequestKey:
    """Prefill in one engine, decode in the other, KV through the canonical form."""
    key = source.submit("moved", prompt, stage="prefill", max_tokens=24, **sampling)
    source.engine.handle(ExportState(key))
    source.run()
    target.submit("moved", prompt, stage="decode", max_tokens=24, **sampling)
    target.run()
    wanted = target.wanted[-1]
    blocks = [block for p in source.progress if p.key == key for block in p.block_ids][wanted.have_blocks :]
    heads = source.runner.head_range
    data = source.runner.pool.gather(blocks, *heads, sequence_slot=source.progress[-1].sequence_slot)
    dtype = source.engine.scheduler.state.settings.kv_dtype
    target.runner.pool.scatter(data, wanted.block_ids, *heads, dtype, sequence_slot=wanted.sequence_slot)
    target.engine.handle(KVReady(key, source.exported[-1].state))
    target.run()
    return key


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_hand_over_goes_on_as_if_it_had_stayed(real_service, architecture, sampling, warm):
    prompt = PROMPTS[1]
    source, target, alone = (real_service(architecture) for _ in range(3))
    if warm:
        target.submit("warm", prompt[:70], max_tokens=1)
        target.run()
    key = hand_over(source, target, prompt, **sampling)
    if warm and architecture == "llama":
        assert target.wanted[-1].have_blocks == 4
    stayed = alone.submit("stayed", prompt, max_tokens=24, **sampling)
    alone.run()
    assert source.tokens(key) + target.tokens(key) == alone.tokens(stayed)
    target.assert_nothing_held()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_hand_over_into_bfloat16_kv_stays_near(real_service, architecture):
    prompt = PROMPTS[1]
    source, alone = real_service(architecture), real_service(architecture)
    target = real_service(architecture, kv_dtype="bfloat16")
    key = hand_over(source, target, prompt, **GREEDY, logprobs=True)
    stayed = alone.submit("stayed", prompt, max_tokens=24, **GREEDY, logprobs=True)
    alone.run()
    theirs = [p for output in [*source.outputs[key], *target.outputs[key]] for p in output.logprobs]
    ours = [p for output in alone.outputs[stayed] for p in output.logprobs]
    same = 0
    moved = source.tokens(key) + target.tokens(key)
    for token, expected in zip(moved, alone.tokens(stayed), strict=True):
        if token != expected:
            break
        assert abs(theirs[same].logprob - ours[same].logprob) < 0.1
        same += 1
    assert same >= 4
