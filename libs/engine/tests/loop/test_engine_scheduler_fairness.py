"""The order of prompts: bounds, progress, budgets and equal tokens, under every policy."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill_engine.scheduler.cover import num_blocks
from tidemill_engine.step import SchedulerOutput, StepResult

POLICIES = ["fair", "quota", "shortest", "fcfs"]
TOKEN_S = 0.001
"""Seconds of a token; a step costs nothing else, so work is the same in any order."""


def by_tokens(service: Any) -> Any:
    """Lets each step take its tokens' time."""
    execute = service.runner.execute

    def timed(out: SchedulerOutput) -> StepResult:
        result: StepResult = execute(out)
        service.now_s += TOKEN_S * sum(row.num_tokens for row in out.rows)
        return result

    service.runner.execute = timed
    return service


def first_token_times(
    service: Any, arrivals: list[tuple[float, int]], options: Sequence[dict[str, Any]] = ()
) -> list[float]:
    """Seconds to the first token of prompts of so many tokens that arrive at those times, each with its options."""
    keys: list[Any] = []
    seen: dict[Any, float] = {}
    while len(seen) < len(arrivals):
        while len(keys) < len(arrivals) and arrivals[len(keys)][0] <= service.now_s:
            _, length = arrivals[len(keys)]
            more = {"max_tokens": 1} | (options[len(keys)] if options else {})
            keys.append(service.submit(f"r{len(keys)}", [len(keys)] * length, **more))
        if not service.step(0.0):
            service.now_s = max(service.now_s, arrivals[len(keys)][0])
        for key in service.outputs:
            seen.setdefault(key, service.now_s)
    return [seen[key] - arrival for key, (arrival, _) in zip(keys, arrivals, strict=True)]


def backlog_s(arrivals: list[tuple[float, int]], when_s: float) -> float:
    """Work not done by `when_s` by an engine that never rests while there is some, in whatever order."""
    free_s = 0.0
    for arrival_s, length in arrivals:
        if arrival_s <= when_s:
            free_s = max(free_s, arrival_s) + TOKEN_S * length
    return max(0.0, free_s - when_s)


@given(
    gaps=st.lists(
        st.tuples(
            st.floats(0, 0.1),
            st.sampled_from([1, 3, 8, 20, 200]),
            st.sampled_from([1, 1, 20]),
            st.integers(-2, 2),
            st.sampled_from([0.0, 0.05, 0.5]),
        ),
        min_size=1,
        max_size=25,
    ),
    stretch=st.sampled_from([0.5, 2.0, 3.0]),
    slack_s=st.sampled_from([0.1, 60.0]),
    classes=st.booleans(),
    aging_s=st.sampled_from([0.02, 0.1]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_nobody_waits_beyond_the_stated_bound(emulated_service, gaps, stretch, slack_s, classes, aging_s):
    """A class above costs `aging_s` more for each step of priority; targets and decoding cost their work only."""
    service = by_tokens(
        emulated_service(
            num_blocks=2000,
            max_num_seqs=30,
            fair_stretch=stretch,
            fair_slack_s=slack_s,
            priority_aging_s=aging_s,
            block_size=4,
        )
    )
    arrivals, work, options, at_s = [], [], [], 0.0
    for gap_s, length, outputs, priority, slo_ttft_s in gaps:
        at_s += gap_s
        arrivals.append((at_s, length))
        work.append((at_s, length + outputs - 1))
        options.append({"max_tokens": outputs, "priority": priority * classes, "slo_ttft_s": slo_ttft_s})
    # While costs are not known a full step counts 0.1 s, so a token may count more than it takes.
    assumed_s = max(TOKEN_S, 0.1 / 32)
    step_s = 32 * TOKEN_S
    waits = first_token_times(service, arrivals, options)
    highest = max(option["priority"] for option in options)
    for (at_s, length), option, waited_s in zip(arrivals, options, waits, strict=True):
        slack = min(stretch * assumed_s * length, slack_s) + (highest - option["priority"]) * aging_s
        assert waited_s <= slack + backlog_s(work, at_s + slack) + 2 * step_s + 1e-9
    while service.step(0.0):
        pass
    service.assert_nothing_held()


def endless_short_ones(service: Any, until: Any, count: int = 3000) -> int:
    """Short prompts that fill the engine by themselves, until the request has its first token."""
    for index in range(count):
        if service.finish(until):
            return index
        service.submit(f"s{index}", [index % 900] * 24, max_tokens=1)
        service.step(0.0)
    return count


@pytest.mark.parametrize("policy", ["fair", "quota", "fcfs"])
def test_a_long_prompt_ends_under_an_endless_stream_of_short_ones(emulated_service, policy):
    service = by_tokens(emulated_service(num_blocks=600, prefill_policy=policy))
    long = service.submit("long", list(range(600)), max_tokens=1)
    assert endless_short_ones(service, long) < 600


def test_shortest_first_has_no_such_bound(emulated_service):
    service = by_tokens(emulated_service(num_blocks=600, prefill_policy="shortest", max_num_batched_tokens=24))
    long = service.submit("long", list(range(600)), max_tokens=1)
    assert endless_short_ones(service, long, 300) == 300


@pytest.mark.parametrize("policy", ["fair", "quota", "shortest"])
def test_short_prompts_do_not_wait_for_a_long_one(emulated_service, policy):
    waits = {}
    for name in (policy, "fcfs"):
        service = by_tokens(emulated_service(num_blocks=600, prefill_policy=name))
        waits[name] = first_token_times(service, [(0.0, 1000), *[(0.1 + 0.05 * i, 8) for i in range(6)]])
    assert max(waits[policy][1:]) < 0.35 < 0.6 < min(waits["fcfs"][1:])
    assert waits[policy][0] == pytest.approx(waits["fcfs"][0], abs=6 * 8 * TOKEN_S + 0.001)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_stepped_back_goes_on_where_it_was(emulated_service, policy):
    service = by_tokens(emulated_service(num_blocks=600, prefill_policy=policy))
    arrivals = [(0.0, 700), (0.05, 500), *[(0.1 + 0.02 * i, 12) for i in range(20)]]
    first_token_times(service, arrivals)
    assert service.runner.computed_tokens == sum(length for _, length in arrivals)


def test_a_quota_doubles_each_time_that_a_prompt_stepped_back(emulated_service):
    service = by_tokens(emulated_service(num_blocks=2000, prefill_policy="quota", quota_chunks=1))
    long = service.submit("long", [1] * (32 * 31), max_tokens=1)
    service.step(0.0)
    row = service.engine.scheduler.state.requests[long].row
    # As many short prompts, of a chunk each, as there is time for: it always steps back for somebody.
    for index in range(100):
        if service.finish(long):
            break
        service.submit(f"s{index}", [2 + index] * 32, max_tokens=1)
        service.step(0.0)
    chunks = ["long" if any(part.row == row for part in out.rows) else "short" for out in service.runner.steps]
    runs = [len(list(group)) for name, group in itertools.groupby(chunks) if name == "long"]
    assert runs == [1, 2, 4, 8, 16]


@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.sampled_from([1, 5, 30, 60, 76]), min_size=1, max_size=14),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_tiny_pool_neither_deadlocks_nor_leaks_and_partial_prompts_keep_to_their_share(
    emulated_service, emulated_continuation, policy, lengths, share, seed
):
    service = by_tokens(
        emulated_service(num_blocks=20, prefill_policy=policy, partial_kv_share=share, max_num_batched_tokens=8)
    )
    scheduler = service.engine.scheduler

    def watch() -> None:
        partial = [r for r in scheduler.state.running if r.num_computed_tokens < r.prompt_tokens]
        # The step that runs now ends some of them.
        parts = {row.row: row.start + row.num_tokens for row in service.runner.steps[-1].rows}
        left = [r for r in partial if parts.get(r.row, r.num_computed_tokens) < r.prompt_tokens]
        held = sum(num_blocks(r.prompt_tokens, 4) for r in left)
        assert len(left) <= 1 or (held <= share * 20 and len(left) <= scheduler.state.settings.max_partial_prefills)

    execute = service.runner.execute
    service.runner.execute = lambda out: (execute(out), watch())[0]
    rng = random.Random(seed)
    prompts = {}
    for index, length in enumerate(lengths):
        prompt = [index] * length
        prompts[service.submit(f"r{index}", prompt, max_tokens=4)] = prompt
        for _ in range(rng.randrange(4)):
            service.step(0.0)
    while service.step(0.0):
        pass
    for key, prompt in prompts.items():
        assert service.finish(key) == "length"
        assert service.tokens(key) == emulated_continuation(prompt, 4)
    service.assert_nothing_held()


def test_a_target_that_can_be_met_moves_a_prompt_forward_and_a_lost_one_does_not(emulated_service):
    def order(slo_ttft_s: float, waited_s: float) -> list[str]:
        service = by_tokens(emulated_service(num_blocks=600, fair_stretch=100.0))
        urgent = service.submit("urgent", [1] * 400, max_tokens=1, slo_ttft_s=slo_ttft_s)
        service.now_s = waited_s
        service.submit("other", [2] * 200, max_tokens=1)
        while not service.finish(urgent):
            service.step(0.0)
        return [o.key.request_id for report in service.reports for o in report.outputs if o.finish]

    assert order(0.0, 0.5) == ["other", "urgent"]
    assert order(2.0, 0.5) == ["urgent"]
    assert order(2.0, 1.9) == ["other", "urgent"]


def test_arrival_order_and_policy_change_no_token_of_a_real_model(real_service):
    rng = random.Random(5)
    prompts = {f"r{i}": [rng.randrange(200) for _ in range(length)] for i, length in enumerate([3, 90, 9, 40, 20, 70])}
    outputs = []
    for policy, names in (("fcfs", list(prompts)), ("fair", rng.sample(list(prompts), len(prompts)))):
        service = real_service("llama", prefill_policy=policy, max_num_batched_tokens=16)
        keys = {}
        for name in names:
            # Classes and targets move them as well, only in the second life.
            urgency = {"priority": rng.randrange(-2, 3), "slo_ttft_s": rng.choice([0.0, 0.01, 10.0])}
            more = urgency if policy == "fair" else {}
            keys[name] = service.submit(name, prompts[name], max_tokens=5, temperature=0.0, **more)
            service.step()
        service.run()
        outputs.append({name: service.tokens(key) for name, key in keys.items()})
        service.assert_nothing_held()
    assert outputs[0] == outputs[1]
