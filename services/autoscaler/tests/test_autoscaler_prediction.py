"""The predicted side of the SLO load, from the step-cost model of a load report."""

import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.events_pb2 import StepCost as StepCostMessage
from tidemill_autoscaler.prediction import predict
from tidemill_autoscaler.view import worst
from tidemill_kvcache.step_cost import StepCost, StepCostLearner, StepShape

COST = StepCost(0.01, 0.001, 0.0, 0.002, 0.0)
TARGETS = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.1}


def report(role: str, cost: StepCost | None = COST, **fields: object) -> LoadReport:
    message = StepCostMessage(**asdict(cost)) if cost else None
    return LoadReport(role=role, step_cost=message, **{**TARGETS, "max_num_batched_tokens": 500, **fields})  # type: ignore[arg-type]


def test_prompts_that_wait_are_load_before_anything_is_measured():
    waiting = report("prefill", waiting_prefill_tokens=3000, slo_load=0.2)
    assert predict(waiting).load == pytest.approx(3000 * 0.001 + 6 * 0.01)
    assert worst([waiting]) == predict(waiting).load
    assert worst([report("prefill", waiting_prefill_tokens=10, slo_load=1.7)]) == 1.7


def test_a_step_has_a_fixed_part_and_one_that_grows_with_the_rows():
    predicted = predict(report("decode", running_requests=20))
    assert predicted.load == pytest.approx(0.05 / 0.1)
    assert predicted.fixed == pytest.approx(0.1)
    assert predict(report("decode", running_requests=20, predicted_tpot_s=0.2)).load == pytest.approx(2.0)


def test_nothing_is_predicted_without_model_target_or_work():
    for nothing in (
        report("decode", None, running_requests=9),
        report("decode", running_requests=0),
        report("decode", running_requests=9, slo_tpot_s=0.0),
        report("prefill", waiting_prefill_tokens=0),
    ):
        assert (predict(nothing).load, predict(nothing).fixed) == (0.0, 0.0)
    assert math.isnan(worst([report("decode", slo_load=math.nan)]))


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1e-4, 0.1), st.floats(1e-6, 0.01))
def test_more_rows_are_never_less_load_and_the_fixed_part_is_a_part(few, more, base_s, row_s):
    cost = StepCost(base_s, 0.001, 0.0, row_s, 0.0)
    loads = [predict(report("decode", cost, running_requests=rows)) for rows in sorted((few, more))]
    assert loads[0].load <= loads[1].load
    assert all(0 < load.fixed <= load.load for load in loads)


def test_what_a_scheduler_has_learnt_is_what_is_predicted_from():
    learner = StepCostLearner()
    for rows in [1, 8, 16, 4] * 40:
        learner.observe(StepShape(decode_rows=rows, decode_context=100 * rows), 0.02 + 0.001 * rows)
    predicted = predict(report("decode", learner.cost, running_requests=16))
    assert predicted.fixed == pytest.approx(0.2, rel=0.1)
