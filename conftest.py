"""How every run of tests begins and ends, whatever it tests."""

import gc
import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# An example that a busy machine did not run for a moment is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI says of a commit what it said of it before; developers' runs look for examples that nobody has seen.
settings.register_profile("repeatable", settings.get_profile("unhurried"), derandomize=True, database=None)
settings.load_profile("repeatable" if os.environ.get("CI") else "unhurried")

_STARTED_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """For runs that must end in time, on a machine of unknown speed."""
    parser.addoption(
        "--begin-within-s", type=float, default=float("inf"), help="skip tests that would begin later than this"
    )


def pytest_configure() -> None:
    """Collecting imports torch and all packages: in a quarter of the time while no garbage is looked for."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays; tests then collect their own garbage only."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def own_garbage() -> Iterator[None]:
    """What a module's tests left open is found at its end and told of its last test, not of some test of another."""
    yield
    gc.collect()
    # What was imported meanwhile stays: only what comes from now on is looked through again.
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that comes too late is skipped, and the report says so."""
    limit_s = item.config.getoption("--begin-within-s")
    if time.monotonic() - _STARTED_S > limit_s:
        pytest.skip(f"not begun: the run's first {limit_s:.0f} s were over")
