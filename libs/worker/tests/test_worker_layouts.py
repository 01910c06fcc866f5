"""A hand-over between workers that differ in TP size and KV dtype, of a model with paged, window and state groups."""

import pytest
from gateway_rig import GatewayRig
from worker_rig import Connect, StartWorker

from tidemill.mesh.v1 import worker_pb2

LENGTHS = (10, 64, 100, 333)


@pytest.mark.full
@pytest.mark.parametrize("direction", ["one-to-two", "two-to-one"])
async def test_a_hand_over_works_between_tp_1_fp32_and_tp_2_bf16(
    start_worker: StartWorker, connect: Connect, direction: str
) -> None:
    one, two = {"max_num_batched_tokens": 128}, {"tp_size": 2, "kv_dtype": "bfloat16", "max_num_batched_tokens": 128}
    source, dest = (one, two) if direction == "one-to-two" else (two, one)
    prefill = start_worker("prefill", f"{direction}-p", "toy", **source)
    decode = start_worker("decode", f"{direction}-d", "toy", **dest)
    async with connect(prefill) as p, connect(decode) as d:
        for length in LENGTHS:
            prompt, request_id = [(7 * i + length) % 250 for i in range(length)], f"r{length}"
            d.submit(f"whole-{length}", prompt)
            await d.finished(f"whole-{length}")
            await d.stub.ResetCache(worker_pb2.ResetCacheRequest())
            assert await hand_over(p, d, request_id, prompt) == d.tokens(f"whole-{length}")
        await p.until_idle()
        await d.until_idle()


async def test_kv_that_was_rounded_further_than_the_pool_rounds_serves_its_own_request_only(
    start_worker: StartWorker, connect: Connect
) -> None:
    rounding = start_worker("prefill", "rounding", kv_dtype="bfloat16")
    exact = start_worker("decode", "exact")
    prompt = [(7 * i) % 250 for i in range(100)]
    async with connect(rounding) as p, connect(exact) as d:
        for source, dest, cached_tokens in ((p, d, 0), (d, p, 96)):
            await hand_over(source, dest, "handed", prompt)
            dest.submit("again", prompt)
            await dest.finished("again")
            assert dest.outputs["again"][0].cached.l1 == cached_tokens
            for rig in (p, d):
                await rig.until_idle()
                await rig.stub.ResetCache(worker_pb2.ResetCacheRequest())
                rig.outputs.clear()


async def hand_over(p: GatewayRig, d: GatewayRig, request_id: str, prompt: list[int]) -> list[int]:
    """Runs a request over both and returns its tokens."""
    p.submit(request_id, prompt, "PREFILL")
    await p.due(request_id)
    d.submit(request_id, prompt, "DECODE", source=await p.ticket(request_id, d))
    assert (await d.finished(request_id)).finish == worker_pb2.FINISH_LENGTH
    return p.tokens(request_id) + d.tokens(request_id)
