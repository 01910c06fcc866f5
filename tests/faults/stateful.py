"""Requests with state of their own, and whether what a fault disturbed is what it would have been."""

import asyncio
import json

import pytest

from tidemill.completion import Completion

SCHEMA = {
    "type": "object",
    "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 60, "maxItems": 60}},
    "required": ["flags"],
    "additionalProperties": False,
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "ignore_eos": True, "max_tokens": 400}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
REQUESTS = {
    "a grammar": {"json_schema": json.dumps(SCHEMA), "temperature": 0.9, "seed": 7, "max_tokens": 600},
    "two choices": {"n": 2, **SAMPLED},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, **SAMPLED},
    "greedy penalties": {"repetition_penalty": 1.3, "temperature": 0.0, "ignore_eos": True, "max_tokens": 400},
    "alternatives": {"logprobs": True, "top_logprobs": 3, **SAMPLED},
}
LOGPROB_BOUND = 1e-3


async def run(cluster, client, options, begun=None):
    """One answer; `begun` is set once its second choice, or its only one, has tokens."""
    answer = Completion()
    async for response in client.generate(model=cluster.model, text="Tell.", include_placement=True, **options):
        answer.add(response)
        if begun and len(answer.choices) == options.get("n", 1) and all(c.token_ids for c in answer.choices):
            begun.set()
    return answer


async def begin_all(cluster, client, requests):
    """A task for each request, once all of them have tokens."""
    begun = [asyncio.Event() for _ in requests]
    running = [
        asyncio.create_task(run(cluster, client, options, event))
        for options, event in zip(requests, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    return running


def check_same(disturbed, undisturbed, options):
    """All that a client sees, and once only."""
    assert len(disturbed.choices) == len(undisturbed.choices) == options.get("n", 1)
    for got, right in zip(disturbed.choices, undisturbed.choices, strict=True):
        assert got.token_ids == right.token_ids
        assert got.text == right.text
        assert (got.finish_reason, got.stop_string) == (right.finish_reason, right.stop_string)
        assert [len(token.top) for token in got.logprobs] == [len(token.top) for token in right.logprobs]
        for one, other in zip(got.logprobs, right.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB_BOUND)
    assert disturbed.usage.completion_tokens == undisturbed.usage.completion_tokens


async def stop_string_request(cluster, client):
    """A random model that writes letters only, and a string that it will write late."""
    ids = (await client.tokenize(model=cluster.model, text=LETTERS)).token_ids
    options = {"logit_bias": dict.fromkeys(ids, 100.0), "temperature": 0.9, "seed": 3, "max_tokens": 400}
    text = (await run(cluster, client, options)).text
    late = next(i for i in range(300, 390) if text.index(text[i : i + 4]) == i)
    return {**options, "stop": [text[late : late + 4]]}
