"""Two of each worker behind one gateway: what clients are promised, where requests go, and what a loss costs."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fixtures import kept
from harness.running import RunningCluster
from integration.reference import FP32_BOUND, Reference, Transformers, check_greedy, prompt_of

from tidemill.completion import Completion
from tidemill.v1.inference_pb2 import FINISH_REASON_STOP, FINISH_REASON_TOOL_CALLS

MEASURE_HALF_LIFE_S = 0.1
WORKER = {"block_size": 16, "max_num_batched_tokens": 64}
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "seed": 1234,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Reference:
    """Right logits."""
    torch.set_num_threads(1)
    return Transformers(checkpoint("llama"))


@pytest.fixture(scope="module")
def mesh(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    """Each test leaves it whole. Nobody replaces a killed worker, and there is no L3 that makes all prefill alike."""
    made = RunningCluster.start(
        checkpoint("llama"),
        prefill=2,
        decode=2,
        kvstores=0,
        autoscalers=0,
        settings={"prefill": WORKER, "decode": WORKER, "router": {"measure_half_life_s": MEASURE_HALF_LIFE_S}},
    )
    with kept(made):
        yield made


async def ask(mesh: RunningCluster, **options: Any) -> Completion:
    """One answer; greedy, with log-probabilities and past the end of sequence, unless the test says otherwise."""
    defaults = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": True, "include_placement": True}
    async with mesh.client() as client:
        return await client.complete(model=mesh.model, **{**defaults, **options})


async def letters(mesh: RunningCluster) -> dict[int, float]:
    """A logit bias that lets a random model write lower-case letters only."""
    async with mesh.client() as client:
        answer = await client.tokenize(model=mesh.model, text=LETTERS)
    assert len(answer.token_ids) == len(LETTERS)
    return dict.fromkeys(answer.token_ids, 100.0)


# -- what a request may be and what its answer says --------------------------------------------------------------


async def test_text_chat_and_token_ids_are_the_same_request(mesh, reference):
    messages = [{"role": "user", "content": "Wie geht's? 你好"}]
    async with mesh.client() as client:
        text_ids = (await client.tokenize(model=mesh.model, text="Tidemill")).token_ids
        chat_ids = (await client.tokenize(model=mesh.model, messages=messages)).token_ids
    for given, ids in (({"text": "Tidemill"}, text_ids), ({"messages": messages}, chat_ids)):
        by_input, by_ids = await ask(mesh, **given), await ask(mesh, token_ids=ids)
        assert by_input.choices[0].token_ids == by_ids.choices[0].token_ids
        assert by_input.usage.prompt_tokens == len(ids)
        check_greedy(reference, ids, by_input.choices[0], FP32_BOUND)


async def test_a_choice_does_not_depend_on_how_many_are_asked_for(mesh):
    prompt = prompt_of("choices", 70)
    three = await ask(mesh, token_ids=prompt, n=3, **SAMPLED)
    one = await ask(mesh, token_ids=prompt, n=1, **SAMPLED)
    assert one.choices[0].token_ids == three.choices[0].token_ids
    assert len({tuple(choice.token_ids) for choice in three.choices}) == 3
    assert three.usage.completion_tokens == 3 * 24


async def test_alternatives_are_the_likeliest_tokens_in_order(mesh, reference):
    prompt = prompt_of("alternatives", 40)
    answer = await ask(mesh, token_ids=prompt, top_logprobs=4)
    check_greedy(reference, prompt, answer.choices[0], FP32_BOUND)
    logits = reference.logits([*prompt, *answer.choices[0].token_ids[:-1]])[len(prompt) - 1 :]
    for given, right in zip(answer.choices[0].logprobs, logits.log_softmax(-1), strict=True):
        assert torch.allclose(torch.tensor([top.logprob for top in given.top]), right.topk(4).values, atol=FP32_BOUND)
        assert given.top[0].token_id == given.token_id


async def test_a_json_schema_is_followed(mesh):
    answer = await ask(mesh, text="Say it in JSON.", json_schema=json.dumps(SCHEMA), max_tokens=200, ignore_eos=False)
    said = json.loads(answer.text)
    assert set(said) == {"ok", "size"}
    assert isinstance(said["ok"], bool)
    assert said["size"] in ("small", "large")
    assert answer.choices[0].finish_reason == FINISH_REASON_STOP


async def test_a_required_tool_is_called(mesh):
    async with mesh.client() as client:
        [end] = (await client.tokenize(model=mesh.model, text="]")).token_ids
    tool = {"name": "measure", "description": "Measures.", "parameters_json": json.dumps(SCHEMA), "strict": True}
    answer = await ask(
        mesh,
        messages=[{"role": "user", "content": "How large?"}],
        tools=[tool],
        tool_choice="required",
        # A random model would call it again and again.
        logit_bias={end: 100.0},
        max_tokens=300,
        ignore_eos=False,
    )
    assert answer.choices[0].finish_reason == FINISH_REASON_TOOL_CALLS
    [call] = answer.choices[0].tool_calls
    assert call.name == "measure"
    assert set(json.loads(call.arguments_json)) == {"ok", "size"}


async def test_a_stop_string_ends_the_answer_wherever_its_tokens_begin(mesh):
    bias = await letters(mesh)
    whole = (await ask(mesh, text="abc", logit_bias=bias, max_tokens=40)).text
    assert len(whole) == 40, "one letter for each token"
    for start in (1, 7, 20):
        stop = whole[start : start + 5]
        answer = await ask(mesh, text="abc", logit_bias=bias, max_tokens=40, stop=["#", stop])
        assert answer.text == whole[: whole.index(stop)]
        assert (answer.choices[0].stop_string, answer.choices[0].finish_reason) == (stop, FINISH_REASON_STOP)


async def test_the_first_token_does_not_wait_for_the_hand_over(mesh, reference):
    prompt = prompt_of("first token", 200)
    answer = Completion()
    # Frozen ranks fetch nothing, while their services go on to answer.
    frozen = [mesh.rank_pids(instance)[0] for instance in ("decode-1", "decode-2")]
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        async with mesh.client() as client:
            options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": True}
            async for response in client.generate(model=mesh.model, token_ids=prompt, **options):
                answer.add(response)
                if frozen and answer.choices:
                    assert len(answer.choices[0].token_ids) == 1
                    thaw(frozen)
    finally:
        thaw(frozen)
    assert len(answer.choices[0].token_ids) == 12
    check_greedy(reference, prompt, answer.choices[0], FP32_BOUND)
    await mesh.holds_are_zero()


def thaw(frozen: list[int]) -> None:
    """Lets frozen processes go on; empties the list."""
    while frozen:
        os.kill(frozen.pop(), signal.SIGCONT)


# -- where requests go -------------------------------------------------------------------------------------------


async def measures_fade() -> None:
    """Until idle instances look alike again: on a busy machine two measured rates can differ by any factor, and then it
    is right to recompute a short prefix on the quicker one."""
    await asyncio.sleep(10 * MEASURE_HALF_LIFE_S)


async def test_a_follow_up_goes_to_the_prefill_instance_that_holds_its_prefix(mesh, reference):
    prompts = [prompt_of(f"session {i}", 300) for i in range(6)]
    await measures_fade()
    firsts = await asyncio.gather(*(ask(mesh, token_ids=prompt) for prompt in prompts))
    assert {first.placement.prefill_instance for first in firsts} == {"prefill-1", "prefill-2"}
    for prompt, first in zip(prompts, firsts, strict=True):
        follow_up_prompt = [*prompt, *first.choices[0].token_ids, *prompt_of("next turn", 60)]
        await measures_fade()
        follow_up = await ask(mesh, token_ids=follow_up_prompt)
        assert follow_up.placement.prefill_instance == first.placement.prefill_instance
        assert follow_up.usage.cached_tokens_l1 >= 288
        terms = follow_up.placement.prefill_terms
        assert {"queue", "compute", "total"} <= set(terms)
        assert 0 < terms["compute"] <= terms["total"]
        check_greedy(reference, follow_up_prompt, follow_up.choices[0], FP32_BOUND)


async def test_a_restarted_router_finds_old_prefixes_again(mesh):
    prompts = {f"kept {i}": prompt_of(f"kept {i}", 300) for i in range(3)}
    homes = {name: (await ask(mesh, token_ids=ids)).placement.prefill_instance for name, ids in prompts.items()}
    blocks = await indexed_blocks(mesh)
    mesh.kill("router-1")
    await asyncio.to_thread(mesh.restart, "router-1")

    async with asyncio.timeout(180.0):
        while await indexed_blocks(mesh) < blocks:
            await asyncio.sleep(0.2)
    for name, ids in prompts.items():
        await measures_fade()
        again = await ask(mesh, token_ids=[*ids, *prompt_of(f"more {name}", 60)])
        assert again.placement.degraded == ""
        assert again.placement.prefill_instance == homes[name]
        assert again.usage.cached_tokens_l1 >= 288


async def indexed_blocks(mesh: RunningCluster) -> int:
    """Blocks that the router knows on prefill instances; 0 while it does not answer."""
    router = (await mesh.look()).members.get("router-1")
    if router is None or router.status is None:
        return 0
    return sum(view.index_blocks for view in router.status.instances if view.role == "prefill")


# -- what a loss costs -------------------------------------------------------------------------------------------


async def test_seeded_sampling_gives_the_same_tokens_twice_and_over_the_loss_of_a_decode_instance(mesh):
    prompt = prompt_of("seeded", 100)
    options = {"token_ids": prompt, "max_tokens": 400, **SAMPLED}
    first, second = await ask(mesh, **options), await ask(mesh, **options)
    assert first.choices[0].token_ids == second.choices[0].token_ids

    disturbed = Completion()
    killed = ""
    async with mesh.client() as client:
        async for response in client.generate(model=mesh.model, include_placement=True, **options):
            disturbed.add(response)
            if not killed and len(disturbed.choices[0].token_ids) > 5:
                busy = [name.split(".") for name in await mesh.holds() if name.startswith("decode-")]
                [killed] = [name for name, kind in busy if kind == "requests"]
                mesh.kill(killed)
    assert disturbed.choices[0].token_ids == first.choices[0].token_ids
    assert disturbed.placement.attempts > 1
    assert disturbed.usage.completion_tokens == 400
    await asyncio.to_thread(mesh.restart, killed)
    await mesh.until_members("gateway-1", "router-1", *WORKERS)
    await mesh.holds_are_zero()
