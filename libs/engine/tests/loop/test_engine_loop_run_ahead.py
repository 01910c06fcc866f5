"""Decode steps that begin before the tokens of the step before are known."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from tidemill_engine.engine import Engine
from tidemill_engine.messages import Abort
from tidemill_engine.step import SchedulerOutput, StepResult


@dataclass
class Started:
    result: StepResult
    may_run_ahead: bool


class OverlappingEmulation:
    """Steps run as they begin, as on a device; the host sees their tokens when it finishes them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.unfinished: list[Started] = []
        self.ran_ahead = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, out: SchedulerOutput) -> Started:
        assert len(self.unfinished) <= 1, "one step ahead is all"
        assert not (self.unfinished and (out.freed_rows or out.new_requests)), "rows change only between runs"
        self.ran_ahead += len(self.unfinished)
        self.unfinished.append(Started(self._runner.execute(out), all(row.num_tokens == 1 for row in out.rows)))
        return self.unfinished[-1]

    def finish(self, started: Started) -> StepResult:
        assert self.unfinished.pop(0) is started, "steps finish in order"
        return started.result


@pytest.fixture
def overlapping(emulated_service):
    """emulated_service with a runner that need not be waited for."""

    def make(**options: Any) -> Any:
        driver = emulated_service(**options)
        driver.runner = OverlappingEmulation(driver.runner)
        driver.engine = Engine(driver.runner.settings, driver.runner, clock=lambda: driver.now_s)
        return driver

    return make


def test_decode_runs_one_step_ahead_and_says_the_same(overlapping, emulated_continuation):
    driver, prompt = overlapping(), list(range(10))
    key = driver.submit("a", prompt, max_tokens=12)
    driver.run()
    assert driver.tokens(key) == emulated_continuation(prompt, 12)
    assert driver.finish(key) == "length"
    assert driver.runner.ran_ahead == 10
    driver.assert_nothing_held()


def test_what_follows_a_stop_token_is_dropped(overlapping, emulated_continuation):
    driver, prompt = overlapping(), list(range(7))
    expected = emulated_continuation(prompt, 6)
    key = driver.submit("a", prompt, max_tokens=50, stop_token_ids=[expected[-1]])
    other = driver.submit("b", list(range(30)), max_tokens=20)
    driver.run()
    assert driver.tokens(key) == expected
    assert driver.finish(key) == "stop"
    assert driver.tokens(other) == emulated_continuation(list(range(30)), 20)
    driver.assert_nothing_held()


def test_credit_is_never_overdrawn(overlapping):
    driver = overlapping()
    key = driver.submit("a", list(range(9)), max_tokens=30, credit_tokens=5)
    for _ in range(12):
        driver.step()
    assert len(driver.tokens(key)) == 5


@pytest.mark.parametrize("seed", range(12))
def test_random_comings_and_goings_change_no_output(overlapping, emulated_continuation, seed):
    rng = random.Random(seed)
    driver = overlapping(num_blocks=rng.choice([24, 40, 64]))
    prompts: dict[Any, list[int]] = {}
    aborted = set()
    for i in range(40):
        prompt = [rng.randrange(900) for _ in range(rng.randint(1, 40))]
        expected = emulated_continuation(prompt, 30)
        stops = [expected[rng.randint(3, 29)]] if rng.random() < 0.5 else []
        key = driver.submit(f"r{i}", prompt, max_tokens=rng.randint(1, 30), stop_token_ids=stops)
        prompts[key] = prompt
        for _ in range(rng.randint(0, 12)):
            driver.step()
        if rng.random() < 0.3:
            victim = rng.choice(list(prompts))
            aborted.add(victim)
            driver.engine.handle(Abort(victim))
    driver.run()
    for key, prompt in prompts.items():
        tokens = driver.tokens(key)
        assert tokens == emulated_continuation(prompt, len(tokens))
        assert driver.finish(key) in (("stop", "length", "aborted") if key in aborted else ("stop", "length"))
    assert driver.runner.ran_ahead > 0
    driver.assert_nothing_held()
