"""Rows of a part may stand beside those of an earlier whole run only if what both measured is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill_bench.report import Row, read, with_part, write


def row(metric: str, value: float, workload: str = "a trace", machine: str = "m") -> Row:
    return Row(metric=metric, unit="ms", value=value, higher_is_better=False, workload=workload, machine=machine)


WHOLE = [row("plain", 0.1), row("late", 0.2), row("plain", 0.3, "another trace")]


def test_new_rows_follow_those_of_their_workload(tmp_path: Path) -> None:
    write("name", WHOLE, tmp_path)
    merged = with_part(read("name", tmp_path), [row("plain", 0.1), row("lossy", 0.4)])
    assert merged == [*WHOLE[:2], row("lossy", 0.4), WHOLE[2]]


def test_an_earlier_row_keeps_its_baseline() -> None:
    whole = [replace(WHOLE[0], baseline="peer", baseline_value=1.0)]
    assert with_part(whole, [row("plain", 0.1)]) == whole


@pytest.mark.parametrize(
    "part",
    [[row("lossy", 0.4)], [row("plain", 0.1000001), row("lossy", 0.4)], [row("plain", 0.1, machine="another")]],
    ids=["repeats nothing", "differs in a digit", "another machine"],
)
def test_a_part_of_another_program_is_refused(part: list[Row]) -> None:
    with pytest.raises(ValueError, match=r"run the whole|repeats no row"):
        with_part(WHOLE, part)
