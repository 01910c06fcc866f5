"""Degraded step "local_prefill": while every prefill instance is far behind its target, decode instances with time to
spare compute prompts themselves.

The step is one for each model revision. It only widens what may go to a decode instance alone; whether one has a seat,
room and time is judged for each placement as always (`place_whole`).
"""

from collections.abc import Callable
from dataclasses import replace

import structlog

from tidemill.mesh.v1.membership_pb2 import ROLE_PREFILL
from tidemill_kvcache.degraded import DegradedStep, Marks
from tidemill_router.candidate import Candidate, Costs
from tidemill_router.view import MeshView

NAME = "local_prefill"
OFF_SHARE = 0.5

log = structlog.get_logger()


class LocalPrefill:
    """Looks at the least loaded prefill instance of each model."""

    def __init__(self, load: float, most_tokens: int, clock: Callable[[], float]) -> None:
        self._load = load
        self._most_tokens = most_tokens
        self._clock = clock
        self._steps: dict[str, DegradedStep] = {}

    @property
    def num_on(self) -> int:
        """Models for which the step is on."""
        return sum(step.is_on for step in self._steps.values())

    def observe(self, view: MeshView) -> None:
        """Takes the load reports as they are now; to be called a few times a second."""
        if self._load <= 0:
            return
        revisions = {model.revision for record in view.workers() for model in record.models}
        for gone in self._steps.keys() - revisions:
            del self._steps[gone]
        for revision in revisions:
            step = self._steps.get(revision)
            if step is None:
                step = self._steps[revision] = self._new_step(revision)
            step.observe(least_load(view.candidates(ROLE_PREFILL, revision)))

    def costs(self, revision: str, costs: Costs) -> Costs:
        """With more tokens that a decode instance may compute alone, while the step is on."""
        step = self._steps.get(revision)
        if step is None or not step.is_on:
            return costs
        return replace(costs, direct_uncached_tokens=max(costs.direct_uncached_tokens, self._most_tokens))

    def _new_step(self, revision: str) -> DegradedStep:
        def changed(is_on: bool, load: float) -> None:
            log.warning("degraded", step=NAME, on=is_on, load=round(load, 2), revision=revision)

        return DegradedStep(NAME, Marks(self._load, self._load * OFF_SHARE), self._clock, changed)


def least_load(prefills: list[Candidate]) -> float | None:
    """SLO load of the best of them; None without a report, and without any: then decode instances do it all anyway."""
    loads = [candidate.load for candidate in prefills if candidate.load.total_blocks]
    return min((load.slo_load if load.waiting_prefill_tokens else 0.0 for load in loads), default=None)
