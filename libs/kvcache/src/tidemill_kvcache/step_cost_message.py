"""The step-cost model as load reports carry it."""

from dataclasses import asdict

from tidemill.mesh.v1 import events_pb2
from tidemill_kvcache.step_cost import StepCost


def to_message(cost: StepCost) -> events_pb2.StepCost:
    """For a report."""
    return events_pb2.StepCost(**asdict(cost))


def from_message(cost: events_pb2.StepCost) -> StepCost:
    """Of a report; all zero where it carries none."""
    return StepCost(cost.base_s, cost.prefill_token_s, cost.prefill_context_s, cost.decode_row_s, cost.decode_context_s)
