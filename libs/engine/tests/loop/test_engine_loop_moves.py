"""A request that moves between real engines, at random tokens, says exactly what it would have said had it stayed."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tidemill_engine.messages import KVReady, Release, RequestKey, Suspend
from tidemill_engine.sampling_params import GrammarSpec

PROMPT = [(7 * i * i + 3) % 250 for i in range(75)]
LENGTH = 40
EOS = 258
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, **PENALTIES, "logit_bias": {5: 2.0}},
    "sampled": SAMPLED,
    "another seed": {**SAMPLED, "seed": 12},
    "sampled with all": {**SAMPLED, **PENALTIES, "min_p": 0.01, "logprobs": True, "top_logprobs": 3},
    "constrained": {
        **SAMPLED,
        "grammar": GrammarSpec("lark", 'start: "x" /[a-f]{30,60}/ "y"', "digest"),
        "stop_token_ids": [EOS],
    },
}


def move(source: Any, target: Any, key: RequestKey, sampling: dict[str, Any]) -> bool:
    """The service's part, with KV through the canonical form; False if the request has ended."""
    source.engine.handle(Suspend(key, 1, 30.0))
    suspended = len(source.suspended)
    source.step()
    if len(source.suspended) == suspended:
        return False
    report = source.suspended[-1]
    known = report.state.committed_token_ids[:-1]
    target.submit("", known, key=key, stage="decode", prompt_tokens=len(PROMPT), max_tokens=LENGTH, **sampling)
    target.step()
    wanted, heads = target.wanted[-1], source.runner.head_range
    blocks = report.block_ids[wanted.have_blocks :]
    data = source.runner.pool.gather(blocks, *heads, sequence_slot=report.sequence_slot)
    dtype = source.engine.scheduler.state.settings.kv_dtype
    target.runner.pool.scatter(data, wanted.block_ids, *heads, dtype, sequence_slot=wanted.sequence_slot)
    target.engine.handle(KVReady(key, report.state))
    source.engine.handle(Release(key))
    source.step()
    return True


def outputs(services: list[Any], key: RequestKey) -> tuple[list[int], list[Any]]:
    """Tokens in order of their positions, none twice, and their log-probabilities."""
    parts = sorted((o for s in services for o in s.outputs.get(key, []) if o.token_ids), key=lambda o: o.first_position)
    tokens: list[int] = []
    for part in parts:
        assert part.first_position == len(tokens), "a gap or a repeat"
        tokens += part.token_ids
    return tokens, [entry for part in parts for entry in part.logprobs]


def there_and_back(make: Callable[..., Any], architecture: str, seed: int, sampling: dict[str, Any]) -> None:
    """Random moves between two engines that also serve others, against a third where the request stays alone."""
    rng, services, alone = random.Random(seed), [make(architecture), make(architecture)], make(architecture)
    key = RequestKey("moved")
    services[0].submit("", PROMPT, key=key, max_tokens=LENGTH, **sampling)
    for index, service in enumerate(services):
        service.submit(f"mate{index}", PROMPT[:20], max_tokens=60, temperature=0.0)
    here, moves = 0, 0
    while not any(service.finish(key) for service in services):
        for _ in range(rng.randint(3, 9)):
            services[0].step()
            services[1].step()
        if key in services[here].outputs and move(services[here], services[1 - here], key, sampling):
            here, moves = 1 - here, moves + 1
    stayed = alone.submit("stayed", PROMPT, max_tokens=LENGTH, **sampling)
    alone.run()
    expected, logprobs = outputs([alone], stayed)
    tokens, moved_logprobs = outputs(services, key)
    assert tokens == expected
    assert [(p.rank, p.top_token_ids) for p in moved_logprobs] == [(p.rank, p.top_token_ids) for p in logprobs]
    assert moves >= 2
    for service in services:
        service.run()
        service.assert_nothing_held()


QUICK = [("llama", "sampled with all"), ("llama", "constrained"), ("toy", "greedy with penalties")]
CASES = [
    pytest.param(architecture, name, marks=() if (architecture, name) in QUICK else pytest.mark.full)
    for architecture in ("llama", "toy")
    for name in SAMPLINGS
]


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_every_way_of_sampling_survives_moves(real_service, architecture, name):
    there_and_back(real_service, architecture, len(name), SAMPLINGS[name])


def test_a_stop_token_after_a_move_ends_it_where_it_would_have_ended(real_service):
    alone, source, target = (real_service("llama") for _ in range(3))
    free = alone.submit("free", PROMPT, max_tokens=LENGTH, **SAMPLED)
    alone.run()
    stop = alone.tokens(free)[25]
    sampling = {**SAMPLED, "stop_token_ids": [stop], "min_tokens": 20}
    stayed = alone.submit("stayed", PROMPT, max_tokens=LENGTH, **sampling)
    alone.run()
    key = source.submit("a", PROMPT, max_tokens=LENGTH, **sampling)
    while len(source.tokens(key)) < 12:
        source.step()
    assert move(source, target, key, sampling)
    target.run()
    assert source.tokens(key) + target.tokens(key) == alone.tokens(stayed)
    assert target.finish(key) == alone.finish(stayed) == "stop"
