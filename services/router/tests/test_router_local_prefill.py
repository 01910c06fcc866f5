"""Decode instances compute prompts themselves while no prefill instance keeps up, where they have time to spare."""

from types import SimpleNamespace

import pytest

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_router.candidate import Candidate, Costs
from tidemill_router.local_prefill import LocalPrefill, least_load


def prefill(name: str, load: float, waiting: int = 1000) -> Candidate:
    report = LoadReport(slo_load=load, total_blocks=10, waiting_prefill_tokens=waiting)
    return Candidate((name, 0), DomainRef(instance=name), f"{name}:1", 10, report, 0.1)


class View:
    """Prefill instances of one model."""

    def __init__(self, *candidates: Candidate) -> None:
        self.targets = list(candidates)

    def workers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(models=[SimpleNamespace(revision="m")])] if self.targets else []

    def candidates(self, role: int, revision: str) -> list[Candidate]:
        return self.targets


def test_the_bound_widens_while_all_are_behind_and_narrows_by_itself() -> None:
    now_s = 0.0
    step, costs = LocalPrefill(3.0, 2048, lambda: now_s), Costs(direct_uncached_tokens=16)

    def see(seconds: float, view: View) -> int:
        nonlocal now_s
        for _ in range(round(seconds * 10)):
            now_s += 0.1
            step.observe(view)  # type: ignore[arg-type]
        return step.costs("m", costs).direct_uncached_tokens

    assert see(10, View(prefill("a", 9.0), prefill("b", 1.0))) == 16
    assert see(1, View(prefill("a", 9.0), prefill("b", 4.0))) == 16
    assert see(2, View(prefill("a", 9.0), prefill("b", 4.0))) == 2048
    assert step.num_on == 1
    assert step.costs("other", costs) is costs
    assert see(30, View(prefill("a", 2.0))) == 2048
    assert see(6, View(prefill("a", 1.0))) == 16
    see(5, View(prefill("a", 9.0)))
    assert step.num_on == 1
    assert see(0.1, View()) == 16
    assert step.num_on == 0


@pytest.mark.parametrize("load", [0.0])
def test_zero_is_never(load: float) -> None:
    step = LocalPrefill(load, 2048, lambda: 0.0)
    step.observe(View(prefill("a", 99.0)))  # type: ignore[arg-type]
    assert step.num_on == 0


def test_an_instance_without_work_or_report_is_not_behind() -> None:
    assert least_load([prefill("a", 9.0, waiting=0), prefill("b", 4.0)]) == 0.0
    assert least_load([Candidate(("a", 0), DomainRef(), "a:1", 10)]) is None
