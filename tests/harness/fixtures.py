"""Fixtures of tests that start whole clusters."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.running import RunningCluster
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2, run_loader
from tidemill_mesh import log

LIVE: list[RunningCluster] = []

Checkpoint = Callable[[str], Path]
StartCluster = Callable[..., RunningCluster]


@contextmanager
def kept(made: RunningCluster) -> Iterator[RunningCluster]:
    """A cluster for the length of the block: failed tests show its logs, and nothing of it is left afterwards."""
    LIVE.append(made)
    try:
        yield made
    finally:
        LIVE.remove(made)
        made.remove()


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """The tests' own process logs warnings only; its clusters log as always."""
    log.configure("console", "warning", "tests", "tests")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Gives the folder of a tiny random checkpoint by architecture (llama, qwen2, qwen3, toy), made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(architecture: str) -> Path:
        folder = root / f"tiny-{architecture}"
        if not folder.exists():
            run_loader("tiny", "--architecture", architecture, "--out", str(folder))
        return folder

    return get


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M-Instruct, kept in TIDEMILL_HOME if that is set."""
    home = Home(Path(os.environ.get("TIDEMILL_HOME") or tmp_path_factory.mktemp("home")))
    home.prepare()
    return ensure_smollm2(home)


@pytest.fixture
def start_cluster(checkpoint: Checkpoint) -> Iterator[StartCluster]:
    """Starts clusters of one test: start_cluster(prefill=2, settings={"decode": {"tp_size": 2}}, model=..., ...)."""
    with ExitStack() as stack:

        def start(*, model: Path | None = None, **spec: Any) -> RunningCluster:
            return stack.enter_context(kept(RunningCluster.start(model or checkpoint("llama"), **spec)))

        yield start


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoint) -> Iterator[RunningCluster]:
    """One cluster of the tiny model for all tests of a module that leave it whole."""
    made = RunningCluster.start(checkpoint("llama"))
    with kept(made):
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failed test's report shows the ends of its cluster's logs."""
    report = yield
    if report.failed:
        for live in LIVE:
            report.sections.append((f"logs of {live.home.root}", live.logs()))
    return report
