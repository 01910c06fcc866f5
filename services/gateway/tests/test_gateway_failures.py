"""Losses in mid-request: the client sees a pause, and every token exactly once."""

import asyncio
from dataclasses import replace

import httpx2
import pytest
from gateway_emulated import TEXT, canned, tiny_assets

from tidemill.client import Client
from tidemill.completion import Completion
from tidemill.errors import TidemillError
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError

LONG = (TEXT * 3)[:200]


@pytest.fixture
async def pairs(bare_mesh):
    """Two workers of each role; the first of each is the one that is chosen."""
    bare_mesh.answer = canned(TEXT, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        for _ in range(2):
            await bare_mesh.add(role, step_s=0.002)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    return bare_mesh


def workers(mesh, kind):
    return sorted((w for w in mesh.fleet.values() if kind in w.instance), key=lambda w: w.instance)


async def ask(mesh, max_tokens=200, **options):
    async with Client(mesh.grpc_endpoint) as client:
        return await client.complete(
            model="tiny", text="hello", max_tokens=max_tokens, include_placement=True, **options
        )


async def leaves_nothing(mesh):
    await mesh.until(lambda: sum(w.holds for w in mesh.fleet.values()) == 0)


async def under_way(mesh):
    """The first decode worker, and a request that has some tokens there."""
    decode = workers(mesh, "decode")[0]
    asked = asyncio.create_task(ask(mesh))
    await mesh.until(lambda: any(r.position > 5 for r in decode.running.values()))
    return decode, asked


@pytest.mark.parametrize("position", [1, 17, 199])
async def test_a_decode_worker_that_dies_costs_a_pause_not_a_token(pairs, position):
    workers(pairs, "decode")[0].die_at = position
    done = await ask(pairs)
    assert done.text == LONG
    assert done.usage.completion_tokens == 200
    assert done.placement.attempts == 2
    if position < 199:
        assert done.placement.decode_instance == workers(pairs, "decode")[1].instance
    await leaves_nothing(pairs)


async def test_a_prefill_worker_that_dies_before_its_token_costs_an_attempt(pairs):
    workers(pairs, "prefill")[0].die_at = 0
    done = await ask(pairs)
    assert (done.text, done.placement.attempts) == (LONG, 2)
    await leaves_nothing(pairs)


async def test_an_id_that_comes_again_is_another_request_to_workers(pairs):
    """A client that left may come again with its id while the worker still tells of the first one."""
    decode, prefill = workers(pairs, "decode")[0], workers(pairs, "prefill")[0]
    first = asyncio.create_task(ask(pairs, request_id="again"))
    await pairs.until(lambda: decode.running)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    while True:
        try:
            second = await ask(pairs, request_id="again")
            break
        except TidemillError as error:
            # That the client has left travels on a connection of its own.
            if error.code != errors_pb2.ERROR_CODE_ALREADY_EXISTS:
                raise
    assert (second.text, second.request_id) == (LONG, "again")
    assert len({submit.key.request_id for submit in prefill.submits}) == 2
    await leaves_nothing(pairs)


async def test_a_resumed_attempt_submits_prompt_and_emitted_tokens(pairs):
    workers(pairs, "decode")[0].die_at = 30
    await ask(pairs)
    resumed = workers(pairs, "decode")[1].submits[-1]
    assert resumed.prompt_tokens == 5
    # What was still in the dead worker's socket was not emitted.
    emitted = len(resumed.token_ids) // 4 - 5
    assert 0 < emitted <= 30
    assert bytes(memoryview(resumed.token_ids).cast("I").tolist()) == b"hello" + LONG[:emitted].encode()
    assert resumed.key.attempt == 2
    first = workers(pairs, "decode")[0].submits[-1]
    assert resumed.sampling.seed == first.sampling.seed


async def test_every_choice_goes_on_after_a_loss(pairs):
    workers(pairs, "decode")[0].die_at = 40
    async with Client(pairs.grpc_endpoint) as client:
        texts: dict[int, str] = {}
        async for response in client.generate(model="tiny", text="hello", max_tokens=120, n=3):
            for choice in response.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(3), LONG[:120])
    await leaves_nothing(pairs)


async def test_a_frozen_worker_is_left_within_the_liveness_bound(pairs):
    frozen = workers(pairs, "decode")[0]
    asked = asyncio.create_task(ask(pairs))
    await pairs.until(lambda: any(r.position > 20 for r in frozen.running.values()))
    frozen.frozen = True
    done = await asked
    assert (done.text, done.placement.attempts) == (LONG, 2)
    frozen.frozen = False
    await leaves_nothing(pairs)


async def test_credit_that_a_worker_has_lost_is_told_again_in_a_roll_call(bare_mesh):
    bare_mesh.settings = replace(bare_mesh.settings, credit_window_tokens=16)
    bare_mesh.answer = canned(TEXT, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role, loses_credit=True)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    async with Client(bare_mesh.grpc_endpoint) as client:
        options = {"model": "tiny", "text": "hello", "max_tokens": 30, "include_placement": True}
        answer = Completion()
        async for response in client.generate(**options):
            answer.add(response)
    assert (answer.text, answer.placement.attempts) == (LONG[:30], 1)
    await leaves_nothing(bare_mesh)


async def test_a_worker_that_refuses_as_stale_is_asked_no_more(pairs):
    workers(pairs, "decode")[0].refuse = MeshError(errors_pb2.ERROR_CODE_STALE, "ticket is spent")
    done = await ask(pairs, max_tokens=20)
    assert (done.text, done.placement.attempts) == (LONG[:20], 2)
    await leaves_nothing(pairs)


async def test_a_worker_that_refuses_the_request_itself_ends_it(pairs):
    error = MeshError(errors_pb2.ERROR_CODE_UNSUPPORTED, "no such grammar", field="response_format")
    workers(pairs, "prefill")[0].refuse = error
    with pytest.raises(TidemillError) as caught:
        await ask(pairs)
    assert (caught.value.code, caught.value.field) == (errors_pb2.ERROR_CODE_UNSUPPORTED, "response_format")
    await leaves_nothing(pairs)


async def test_a_grammar_that_a_worker_refuses_is_named_as_its_caller_calls_it(pairs):
    error = MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "Invalid type: nope", field="sampling.grammar")
    workers(pairs, "prefill")[0].refuse = error
    with pytest.raises(TidemillError) as caught:
        await ask(pairs, json_schema='{"type": "nope"}')
    assert caught.value.field == "response_format.json_schema"
    await leaves_nothing(pairs)


async def test_a_setting_that_a_worker_refuses_is_named_as_its_caller_calls_it(pairs):
    error = MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "too many", field="sampling.max_tokens")
    workers(pairs, "prefill")[0].refuse = error
    with pytest.raises(TidemillError) as caught:
        await ask(pairs)
    assert caught.value.field == "sampling.max_tokens"
    workers(pairs, "prefill")[0].refuse = error
    async with httpx2.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{pairs.http}/v1/completions", json={"model": "tiny", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    await leaves_nothing(pairs)


async def test_attempts_are_bounded(pairs):
    for worker in pairs.fleet.values():
        worker.answer = canned(TEXT)

    async def refuse_for_ever():
        while True:
            for worker in pairs.fleet.values():
                worker.refuse = MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "rank is gone")
            await asyncio.sleep(0.001)

    refusing = asyncio.create_task(refuse_for_ever())
    with pytest.raises(TidemillError, match="rank is gone"):
        await ask(pairs)
    refusing.cancel()
    for worker in pairs.fleet.values():
        worker.refuse = None
    assert sum(len(w.submits) for w in pairs.fleet.values()) <= 2 * pairs.settings.max_attempts
    await leaves_nothing(pairs)


async def test_the_only_decode_worker_may_come_back(bare_mesh):
    bare_mesh.answer = canned(TEXT, ends=False)
    await bare_mesh.add(ROLE_PREFILL)
    only = await bare_mesh.add(ROLE_DECODE, step_s=0.005, die_at=10)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    asked = asyncio.create_task(ask(bare_mesh, max_tokens=50))
    await bare_mesh.until(lambda: only.die_at == -1)
    await asyncio.sleep(0.2)
    assert not asked.done()
    await bare_mesh.add(ROLE_DECODE)
    done = await asked
    assert done.text == LONG[:50]


async def test_a_deadline_ends_both_legs(pairs):
    for worker in pairs.fleet.values():
        worker.step_s = 0.05
    with pytest.raises(TidemillError) as caught:
        await ask(pairs, timeout_s=0.6)
    assert caught.value.code == errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await leaves_nothing(pairs)


async def test_a_grpc_client_that_leaves_ends_its_request(pairs):
    async with Client(pairs.grpc_endpoint) as client:
        async for _ in client.generate(model="tiny", text="hello", max_tokens=1000):
            break
    await leaves_nothing(pairs)


async def test_a_lost_output_costs_an_attempt_and_no_token(pairs):
    decode, asked = await under_way(pairs)
    for running in decode.running.values():
        running.position += 1
    done = await asked
    assert (done.text, done.placement.attempts) == (LONG, 2)
    await leaves_nothing(pairs)


async def test_a_request_that_a_live_worker_has_lost_is_tried_again(pairs):
    decode, asked = await under_way(pairs)
    decode.running.clear()
    done = await asked
    assert (done.text, done.placement.attempts) == (LONG, 2)
    await leaves_nothing(pairs)


async def test_a_repeated_output_ends_the_request_instead_of_a_splice(pairs):
    decode, asked = await under_way(pairs)
    for running in decode.running.values():
        running.position -= 1
    with pytest.raises(TidemillError, match="was due") as caught:
        await asked
    assert caught.value.code == errors_pb2.ERROR_CODE_INTERNAL
    await leaves_nothing(pairs)


async def test_without_prefill_workers_a_decode_worker_does_both_stages(bare_mesh):
    await bare_mesh.add(ROLE_DECODE)
    bare_mesh.settings = replace(bare_mesh.settings, placement_wait_s=5.0)
    await bare_mesh.start_gateway()
    done = await ask(bare_mesh, max_tokens=10)
    assert done.text == TEXT[:10]
    assert done.placement.prefill_instance == done.placement.decode_instance


async def test_several_models_are_served_at_once_and_a_dead_worker_breaks_no_list(bare_mesh):
    other = tiny_assets("other")
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role)
        await bare_mesh.add(role, other, answer=canned("other text"))
    await bare_mesh.start_gateway()
    async with Client(bare_mesh.grpc_endpoint) as client:
        await bare_mesh.until_ready()
        await bare_mesh.until(lambda: workers(bare_mesh, "decode"))
        async with asyncio.timeout(120):
            while len(await client.models()) < 2:
                await asyncio.sleep(0.01)
        assert (await client.complete(model="other", text="x", max_tokens=50)).text == "other text"
        for worker in workers(bare_mesh, "prefill"):
            worker.die()
        assert [model.name for model in await client.models()] == ["other", "tiny"]
