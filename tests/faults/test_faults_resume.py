"""Requests with state of their own (a grammar, choices, seeds, penalties, a stop string) go on where they were."""

import asyncio
import json

from faults.stateful import REQUESTS, begin_all, check_same, run, stop_string_request

from tidemill.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP

# The first test's time includes the start of a cluster.


async def test_every_kind_of_state_goes_on_when_all_decode_instances_are_lost(pairs):
    async with pairs.client() as client:
        requests = [*REQUESTS.values(), await stop_string_request(pairs, client)]
        undisturbed = await asyncio.gather(*(run(pairs, client, options) for options in requests))
        running = await begin_all(pairs, client, requests)
        assert not any(task.done() for task in running), "ended before the fault"
        for victim in ("decode-1", "decode-2"):
            pairs.kill(victim)
        await asyncio.gather(*(asyncio.to_thread(pairs.restart, name) for name in ("decode-1", "decode-2")))
        disturbed = await asyncio.gather(*running)

    for options, got, right in zip(requests, disturbed, undisturbed, strict=True):
        assert got.placement.attempts > 1
        check_same(got, right, options)
    said = json.loads(disturbed[0].text)
    assert len(said["flags"]) == 60
    assert disturbed[0].choices[0].finish_reason == FINISH_REASON_STOP
    assert disturbed[1].choices[0].token_ids != disturbed[1].choices[1].token_ids
    assert disturbed[2].choices[0].finish_reason == FINISH_REASON_LENGTH
    assert disturbed[-1].choices[0].stop_string
    await pairs.until_members(*(name for _, name in pairs.spec.instances()))
    await pairs.holds_are_zero(within_s=90.0)
