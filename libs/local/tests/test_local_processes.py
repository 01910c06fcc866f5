"""Detached processes and their pid files."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill_local import processes
from tidemill_local.processes import ProcessRecord

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


@pytest.fixture
def started(tmp_path: Path):
    """Starts processes that are gone after the test."""
    records: list[ProcessRecord] = []

    def start(name: str, argv: list[str]) -> ProcessRecord:
        record = processes.start(name, argv, run_dir=tmp_path / "run", log_dir=tmp_path / "logs")
        records.append(record)
        while "up" not in processes.log_tail(record) and processes.alive(record):
            time.sleep(0.01)
        return record

    yield start
    for record in records:
        processes.kill(record)
        processes.wait_gone(record, 10)


def test_a_started_process_is_found_again_by_its_pid_file(started, tmp_path):
    record = started("a", SLEEPER)
    assert processes.read_all(tmp_path / "run") == [record]
    assert processes.alive(record)
    assert os.getsid(record.pid) == record.pid


def test_a_name_is_not_started_twice_while_it_lives(started):
    started("a", SLEEPER)
    with pytest.raises(FileExistsError, match="a already runs"):
        started("a", SLEEPER)


def test_a_process_of_the_same_pid_but_another_start_is_never_touched(started):
    record = started("a", SLEEPER)
    for stranger in (replace(record, start_ticks=record.start_ticks - 1), replace(record, boot_id="another boot")):
        assert not processes.alive(stranger)
        assert not processes.send(stranger, signal.SIGKILL)
        processes.kill(stranger)
    assert processes.alive(record)


def test_stop_ends_it_and_removes_what_it_left(started, tmp_path):
    record = started("a", SLEEPER)
    (tmp_path / "run" / "a.json").write_text("{}")
    assert processes.stop(record, run_dir=tmp_path / "run", grace_s=30)
    assert not processes.alive(record)
    assert list((tmp_path / "run").iterdir()) == []


def test_stop_kills_what_does_not_listen(started, tmp_path):
    record = started("a", STUBBORN)
    assert not processes.stop(record, run_dir=tmp_path / "run", grace_s=0.2)
    assert not processes.alive(record)


def test_kill_takes_the_children_of_its_session_along(started):
    record = started("a", [sys.executable, "-c", f"import subprocess; print(subprocess.run({SLEEPER!r}))"])
    children = Path(f"/proc/{record.pid}/task/{record.pid}/children").read_text().split()
    processes.kill(record)
    assert processes.wait_gone(record, 10)
    while any((found := processes.stat(int(child))) and not found.dead for child in children):
        time.sleep(0.01)
    assert children


def test_forget_leaves_the_files_of_a_newer_process(started, tmp_path):
    old = started("a", [sys.executable, "-c", "print('up')"])
    processes.wait_gone(old, 10)
    new = started("a", SLEEPER)
    processes.forget(old, tmp_path / "run")
    assert processes.read(tmp_path / "run", "a") == new


def test_a_dead_child_that_nobody_waited_for_is_not_alive(started):
    record = started("a", [sys.executable, "-c", "pass"])
    assert processes.wait_gone(record, 10)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "a"}', "null"])
def test_a_damaged_pid_file_is_no_process(tmp_path, text):
    (tmp_path / "a.pid").write_text(text)
    assert processes.read_all(tmp_path) == []


def test_log_tail_gives_the_last_lines(started):
    record = started("a", [sys.executable, "-c", "print('up'); print(*range(100), sep='\\n')"])
    processes.wait_gone(record, 10)
    assert processes.log_tail(record, 2) == "98\n99"
