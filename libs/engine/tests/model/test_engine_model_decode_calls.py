"""A decode step of the torch reference costs as many calls for many requests as for few: no loop over requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 8


class Calls(TorchDispatchMode):
    """Counts what torch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "toy"])
def test_a_decode_step_makes_no_more_calls_for_eight_requests_than_for_two(
    architecture: str, tiny: Callable[..., Path], start_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start_runner(tiny(architecture), weights="fp32", max_num_seqs=ROWS + 1)
    assert driver.runner.backend.startswith("cpu/torch-reference")
    forward = driver.runner.model.forward
    counted: list[int] = []

    def counting(*args: Any) -> torch.Tensor:
        with Calls() as calls:
            result: torch.Tensor = forward(*args)
        counted.append(calls.count)
        return result

    for row in range(ROWS):
        driver.add(row, range(3 + row, 20 + row))
        driver.prefill(row)
    monkeypatch.setattr(driver.runner.model, "forward", counting)
    # Not one, for whose shape torch itself takes other ways.
    for rows in (2, ROWS // 2, ROWS):
        driver.step(dict.fromkeys(range(rows), 1))
    assert len(set(counted)) == 1
    assert counted[0] > 10
    # A chunk is a loop of its own, so that the count can tell.
    driver.add(ROWS, range(20))
    driver.step({0: 1, 1: 1, ROWS: 20})
    assert counted[-1] > counted[0]
