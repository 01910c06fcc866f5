"""A cache domain starts, fails and restarts as one unit. The ranks are emulated."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from structlog.testing import capture_logs

from tidemill_engine import messages
from tidemill_worker.domain import Domain
from tidemill_worker.launch import plan_ranks
from tidemill_worker.restarts import RestartPolicy
from tidemill_worker.settings import WorkerSettings

EMULATED_RANK = str(Path(__file__).with_name("emulated_rank.py"))


def alive(pid: int) -> bool:
    """Whether a process exists."""
    return os.path.exists(f"/proc/{pid}")


class Recorder:
    """Hooks that remember what they were told."""

    def __init__(self) -> None:
        self.ups: list[str] = []
        self.downs: list[str] = []
        self.reports: list[tuple[int, messages.Report]] = []
        self.changed = asyncio.Event()

    def domain_up(self, domain: Domain) -> None:
        self.ups.append(domain.epoch)
        self.changed.set()

    def domain_down(self, domain: Domain, reason: str) -> None:
        self.downs.append(reason)
        self.changed.set()

    def domain_reports(self, domain: Domain, rank: int, reports: list[messages.Report]) -> None:
        self.reports += [(rank, report) for report in reports]
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on what was told."""
        async with asyncio.timeout(300):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(
    behaviour: str,
    folder: Path,
    *,
    tp_size: int = 1,
    limit: int = 5,
    start_timeout_s: float = 300,
    watchdog_s: float = 300,
) -> AsyncIterator[tuple[Domain, Recorder, asyncio.Task[None]]]:
    """A domain of emulated ranks."""
    settings = WorkerSettings(model=str(folder), tp_size=tp_size, transport="tcp")
    recorder = Recorder()
    module = [sys.executable, EMULATED_RANK, behaviour]
    domain = Domain(
        0,
        partial(plan_ranks, settings, 0, socket_dir=folder, rank_module=module),
        RestartPolicy(limit=limit, window_s=600, backoff_s=0.01, max_backoff_s=0.01, clock=time.monotonic),
        recorder,
        start_timeout_s=start_timeout_s,
        watchdog_s=watchdog_s,
    )
    task = asyncio.create_task(domain.run())
    try:
        yield domain, recorder, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_ready_domain_reports_and_ends_with_its_service(tmp_path: Path) -> None:
    async with running("steady", tmp_path) as (domain, recorder, _):
        await recorder.until(lambda: bool(recorder.reports))
        assert domain.up
        assert isinstance(recorder.reports[0][1], messages.StepReport)
        (pid,) = domain.pids
    assert not domain.up
    assert recorder.downs == ["its service ended"]
    assert not alive(pid)
    assert not os.listdir(tmp_path)


async def test_a_killed_rank_is_named_and_the_domain_restarts_under_a_new_epoch(tmp_path: Path) -> None:
    async with running("steady", tmp_path) as (domain, recorder, _):
        await recorder.until(lambda: len(recorder.ups) == 1)
        os.kill(domain.pids[0], signal.SIGKILL)
        await recorder.until(lambda: len(recorder.ups) == 2)
        assert recorder.downs == ["domain 0 rank 0 was ended by SIGKILL"]
        assert recorder.ups[0] != recorder.ups[1]


async def test_the_ranks_of_a_domain_restart_together(tmp_path: Path) -> None:
    async with running("steady", tmp_path, tp_size=2) as (domain, recorder, _):
        await recorder.until(lambda: len(recorder.ups) == 1)
        before = domain.pids
        os.kill(before[1], signal.SIGKILL)
        await recorder.until(lambda: len(recorder.ups) == 2)
        assert "rank 1 was ended by SIGKILL" in recorder.downs[0]
        assert not set(before) & set(domain.pids)
        assert not alive(before[0])


async def test_a_frozen_leader_is_restarted_by_the_watchdog(tmp_path: Path) -> None:
    async with running("frozen", tmp_path, watchdog_s=0.3) as (_, recorder, _task):
        await recorder.until(lambda: len(recorder.ups) == 2)
        assert recorder.downs[0] == "domain 0 rank 0 reported nothing for 0.3 s"


async def test_last_words_are_kept(tmp_path: Path) -> None:
    async with running("last-words", tmp_path) as (domain, recorder, _):
        await recorder.until(lambda: domain.starts == 2)
        assert "out of memory" in domain.last_failure


async def test_a_malformed_report_ends_the_epoch(tmp_path: Path) -> None:
    async with running("garbage", tmp_path) as (domain, recorder, _):
        await recorder.until(lambda: domain.starts == 2)
        assert "malformed report" in domain.last_failure


async def test_a_domain_that_fails_too_often_stays_down(tmp_path: Path) -> None:
    with capture_logs() as logged:
        async with running("last-words", tmp_path, limit=2) as (domain, _, task):
            await asyncio.wait_for(task, 300)
        assert domain.given_up
        assert domain.starts == 3
    assert "cache domain stays down after too many failures" in [line["event"] for line in logged]


async def test_a_domain_that_never_was_ready_is_tried_twice(tmp_path: Path) -> None:
    async with running("dies-at-start", tmp_path) as (domain, recorder, task):
        await asyncio.wait_for(task, 300)
        assert domain.given_up
        assert domain.starts == 2
        assert "exited with status 3" in domain.last_failure
        assert recorder.ups == recorder.downs == []


async def test_a_rank_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    async with running("never-ready", tmp_path, limit=0, start_timeout_s=1.0) as (domain, _, task):
        await asyncio.wait_for(task, 300)
        assert "not ready within 1 s" in domain.last_failure


async def test_a_command_that_does_not_exist_is_a_failure_by_name(tmp_path: Path) -> None:
    settings = WorkerSettings(model=str(tmp_path), transport="tcp")
    domain = Domain(
        0,
        partial(plan_ranks, settings, 0, socket_dir=tmp_path, rank_module=["/nonexistent/rank"]),
        RestartPolicy(limit=0, window_s=600, backoff_s=0.01, max_backoff_s=0.01, clock=time.monotonic),
        Recorder(),
        start_timeout_s=60,
        watchdog_s=60,
    )
    await asyncio.wait_for(domain.run(), 300)
    assert "/nonexistent/rank" in domain.last_failure
