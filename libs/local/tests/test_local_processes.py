"""Detached processes and their pid files."""

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill_local import ports, processes
from tidemill_local.processes import ProcessRecord

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# Its first thread ends alone, by the system call; the other one listens until it is killed.
HALF_ENDED = [
    sys.executable,
    "-c",
    """
import ctypes, os, socket, threading, time
listener = socket.create_server(("127.0.0.1", 0))
def rest():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    print("up at", listener.getsockname()[1], flush=True)
    time.sleep(600)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
""",
]
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
        processes.wait_gone(record, 120)


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


def test_a_process_is_gone_once_its_last_thread_is_and_its_port_is_free(started):
    record = started("a", HALF_ENDED)
    port = int(processes.log_tail(record).split()[-1])
    assert ports.is_listening("127.0.0.1", port)
    assert processes.alive(record)
    processes.kill(record)
    assert processes.wait_gone(record, 120)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_stop_ends_it_and_removes_what_it_left(started, tmp_path):
    record = started("a", SLEEPER)
    (tmp_path / "run" / "a.json").write_text("{}")
    assert processes.stop(record, run_dir=tmp_path / "run", grace_s=300)
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
    assert processes.wait_gone(record, 120)
    while any((found := processes.stat(int(child))) and not found.dead for child in children):
        time.sleep(0.01)
    assert children


def test_forget_leaves_the_files_of_a_newer_process(started, tmp_path):
    old = started("a", [sys.executable, "-c", "print('up')"])
    processes.wait_gone(old, 120)
    new = started("a", SLEEPER)
    processes.forget(old, tmp_path / "run")
    assert processes.read(tmp_path / "run", "a") == new


def test_a_dead_child_that_nobody_waited_for_is_not_alive(started):
    record = started("a", [sys.executable, "-c", "pass"])
    assert processes.wait_gone(record, 120)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "a"}', "null"])
def test_a_damaged_pid_file_is_no_process(tmp_path, text):
    (tmp_path / "a.pid").write_text(text)
    assert processes.read_all(tmp_path) == []


def test_log_tail_gives_nothing_of_earlier_processes_of_the_name(started, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("what went wrong before\n")
    assert processes.log_tail(started("a", SLEEPER)) == "up"


def test_log_tail_gives_the_last_lines(started):
    record = started("a", [sys.executable, "-c", "print('up'); print(*range(100), sep='\\n')"])
    processes.wait_gone(record, 120)
    assert processes.log_tail(record, 2) == "98\n99"


def test_the_age_of_a_process_does_not_depend_on_the_wall_clock(started):
    before = time.monotonic()
    record = replace(started("a", SLEEPER), started_unix_s=0.0)
    first = processes.age_s(record)
    assert 0 <= first <= time.monotonic() - before + 0.1, "in ticks of a hundredth of a second"
    assert processes.age_s(record) >= first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_while_a_process_is_started_leaves_none_without_its_pid_file(tmp_path, monkeypatch, number):
    spawn = os.posix_spawnp

    def interrupted_spawn(*arguments, **options):
        pid = spawn(*arguments, **options)
        os.kill(os.getpid(), number)
        return pid

    monkeypatch.setattr(os, "posix_spawnp", interrupted_spawn)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.start("sleeper", SLEEPER, run_dir=tmp_path, log_dir=tmp_path)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    record = processes.read(tmp_path, "sleeper")
    assert record is not None
    assert processes.alive(record)
    processes.kill(record)
    assert processes.wait_gone(record, 300)


def test_what_is_ignored_stays_ignored_in_what_is_started(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = processes.start("sleeper", SLEEPER, run_dir=tmp_path, log_dir=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    ignored = next(line for line in Path(f"/proc/{record.pid}/status").read_text().splitlines() if "SigIgn" in line)
    processes.kill(record)
    assert processes.wait_gone(record, 300)
    assert int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1
