"""What a worker's work will take by the step-cost model that its load report carries, over the target.

prefill   seconds until all waiting prompts are computed
decode    seconds of a step, which are a fixed part and one that grows with the rows: half the work is not half the load
"""

from dataclasses import dataclass

from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_kvcache.step_cost import StepCost
from tidemill_kvcache.step_cost_message import from_message


@dataclass(frozen=True)
class Predicted:
    """An SLO load, and its part that any work costs, however little."""

    load: float = 0.0
    fixed: float = 0.0


def predict(report: LoadReport) -> Predicted:
    """The predicted side of the report's SLO load; nothing while the model or the target is not known."""
    cost = from_message(report.step_cost)
    if not cost.known:
        return Predicted()
    if report.role == "decode":
        return _decode(report, cost) if report.slo_tpot_s > 0 else Predicted()
    return _prefill(report, cost) if report.slo_ttft_s > 0 else Predicted()


def _prefill(report: LoadReport, cost: StepCost) -> Predicted:
    chunk = report.max_num_batched_tokens or max(1, report.waiting_prefill_tokens)
    return Predicted(cost.prefill_s(report.waiting_prefill_tokens, 0, chunk) / report.slo_ttft_s)


def _decode(report: LoadReport, cost: StepCost) -> Predicted:
    rows = report.running_requests
    if rows == 0:
        return Predicted()
    # The report does not say how long its rows are; at least they cost what they cost without context.
    step_s = max(report.predicted_tpot_s, cost.decode_step_s(rows, 0))
    return Predicted(step_s / report.slo_tpot_s, min(cost.base_s, step_s) / report.slo_tpot_s)
