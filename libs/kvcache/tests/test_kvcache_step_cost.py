"""The step-cost model: it finds the truth, follows it, and nothing that is measured can break it."""

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache.step_cost import StepCost, StepCostLearner, StepShape

TRUTH = StepCost(0.008, 5e-5, 3e-10, 1e-4, 2e-8)


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        tokens, rows = rng.choice([0, 256, 512, 2048]), rng.randrange(1, 64)
        made.append(StepShape(tokens, tokens * rng.randrange(32_000), rows, rows * rng.randrange(100, 4000)))
    return made


def taught(truth: StepCost, noise: float, learner: StepCostLearner | None = None, count: int = 600) -> StepCostLearner:
    learner, rng = learner or StepCostLearner(), random.Random(1)
    for shape in shapes(count):
        learner.observe(shape, truth.step_s(shape) * rng.lognormvariate(0, noise))
    return learner


def test_it_predicts_steps_prompts_and_decode_from_noisy_measures():
    cost = taught(TRUTH, noise=0.1).cost
    assert cost.prefill_s(8192, 4096, 2048) == pytest.approx(TRUTH.prefill_s(8192, 4096, 2048), rel=0.1)
    assert cost.decode_step_s(32, 32 * 1000) == pytest.approx(TRUTH.decode_step_s(32, 32 * 1000), rel=0.1)
    errors = [abs(cost.step_s(s) / TRUTH.step_s(s) - 1) for s in shapes(100, seed=5)]
    assert max(errors) < 0.3


def test_a_machine_that_gets_slower_is_followed_within_a_few_dozen_steps():
    learner = taught(TRUTH, noise=0.05)
    slower = StepCost(*(2 * weight for weight in astuple(TRUTH)))
    taught(slower, 0.05, learner, count=50)
    assert learner.cost.prefill_s(8192, 0, 2048) == pytest.approx(slower.prefill_s(8192, 0, 2048), rel=0.15)


def test_a_stall_teaches_little():
    learner = taught(TRUTH, noise=0.02)
    before = learner.cost.prefill_s(8192, 0, 2048)
    learner.observe(StepShape(2048, 0, 0, 0), 100.0)
    assert learner.cost.prefill_s(8192, 0, 2048) == pytest.approx(before, rel=0.2)


def test_many_equal_steps_do_not_wash_out_what_is_known_of_others():
    learner = taught(TRUTH, noise=0.02)
    for _ in range(5000):
        learner.observe(StepShape(0, 0, 8, 8000), TRUTH.step_s(StepShape(0, 0, 8, 8000)))
    assert learner.cost.prefill_s(8192, 0, 2048) == pytest.approx(TRUTH.prefill_s(8192, 0, 2048), rel=0.2)


def test_it_stays_sound_through_a_long_life_of_slowly_growing_decodes():
    learner, rng = StepCostLearner(), random.Random(3)
    lengths = [200] * 16
    for step in range(12_000):
        chunk = rng.choice([0, 200]) if step % 90 == 0 else 0
        lengths = [length + 1 if rng.random() > 0.001 else 200 for length in lengths]
        shape = StepShape(chunk, chunk * chunk / 2, len(lengths), sum(lengths))
        learner.observe(shape, TRUTH.step_s(shape) * rng.lognormvariate(0, 0.05))
    cost = learner.cost
    assert cost.decode_step_s(16, sum(lengths)) == pytest.approx(TRUTH.decode_step_s(16, sum(lengths)), rel=0.1)
    assert cost.step_s(StepShape(200, 20_000, 16, 3200)) == pytest.approx(
        TRUTH.step_s(StepShape(200, 20_000, 16, 3200)), rel=0.5
    )


def test_steps_of_one_size_do_not_make_prompts_free():
    learner, rng = StepCostLearner(), random.Random(4)
    for _ in range(40):
        learner.observe(StepShape(128, 128 * 64), 0.25 * rng.lognormvariate(0, 0.3))
    assert learner.cost.known
    assert learner.cost.prefill_s(1280, 0, 128) == pytest.approx(2.5, rel=0.3)


def test_a_prompt_costs_the_sum_of_its_chunks():
    chunks = [StepShape(512, 512 * (start + 256)) for start in range(1024, 4096, 512)]
    assert TRUTH.prefill_s(3072, 1024, 512) == pytest.approx(sum(map(TRUTH.step_s, chunks)))


def test_what_is_not_known_costs_nothing():
    learner = StepCostLearner()
    learner.observe(StepShape(100), 9.0)
    assert not learner.cost.known
    assert learner.cost.prefill_s(1000, 0, 100) == 0.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 20),
            st.floats(0, 1e12),
            st.integers(0, 4096),
            st.integers(0, 1 << 30),
            st.floats(min_value=-1, max_value=1e6) | st.just(float("nan")),
        ),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_no_measure_makes_it_negative_or_infinite(steps):
    learner = StepCostLearner()
    for tokens, context, rows, decode_context, step_s in steps:
        learner.observe(StepShape(tokens, context, rows, decode_context), step_s)
        assert all(0.0 <= weight < 1e9 for weight in astuple(learner.cost))
