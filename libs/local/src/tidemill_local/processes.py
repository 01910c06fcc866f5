"""Detached processes with pid files that outlive whoever started them.

A pid is reused by the kernel, so a record also holds the start time (clock ticks since boot) and the boot's id:
nothing is ever signalled or counted as alive unless all three match.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill_local.home import write_atomically
from tidemill_local.interrupts import deferred

POLL_S = 0.02
PID_SUFFIX = ".pid"


@dataclass(frozen=True)
class ProcessRecord:
    """One started process, as its pid file says."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    argv: tuple[str, ...]
    log: str
    started_unix_s: float
    log_start_bytes: int = 0
    """Where in its log this process begins; what is before are earlier ones of its name."""


def start(
    name: str, argv: Sequence[str], *, run_dir: Path, log_dir: Path, env: Mapping[str, str] | None = None
) -> ProcessRecord:
    """Starts a process in a session of its own, its output appended to the log; raises FileExistsError if it lives."""
    known = read(run_dir, name)
    if known is not None and alive(known):
        raise FileExistsError(f"{name} already runs as process {known.pid}")
    run_dir.mkdir(parents=True, exist_ok=True)
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{name}.log"
    log_start_bytes = log.stat().st_size if log.exists() else 0
    # A process without a pid file would be ended by nobody.
    with deferred():
        return _spawn(name, argv, run_dir, log, log_start_bytes, os.environ if env is None else env)


def _spawn(
    name: str, argv: Sequence[str], run_dir: Path, log: Path, log_start_bytes: int, env: Mapping[str, str]
) -> ProcessRecord:
    # posix_spawn runs no fork handlers, so a starter with gRPC threads is safe.
    pid = os.posix_spawnp(
        argv[0],
        list(argv),
        dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    found = stat(pid)
    ticks = found.start_ticks if found else 0
    record = ProcessRecord(name, pid, ticks, boot_id(), tuple(argv), str(log), time.time(), log_start_bytes)
    write_atomically(run_dir / f"{name}{PID_SUFFIX}", json.dumps(asdict(record), indent=1) + "\n")
    return record


def read(run_dir: Path, name: str) -> ProcessRecord | None:
    """The record of a name, None if there is none or its file is damaged."""
    try:
        fields = json.loads((run_dir / f"{name}{PID_SUFFIX}").read_text())
        return ProcessRecord(**{**fields, "argv": tuple(fields["argv"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def read_all(run_dir: Path) -> list[ProcessRecord]:
    """All records, the oldest first."""
    names = [path.name.removesuffix(PID_SUFFIX) for path in run_dir.glob(f"*{PID_SUFFIX}")]
    records = [record for name in names if (record := read(run_dir, name)) is not None]
    return sorted(records, key=lambda record: record.started_unix_s)


def alive(record: ProcessRecord) -> bool:
    """True while the very process of the record runs; reaps it if it is this process's dead child."""
    found = stat(record.pid)
    if found is None or found.start_ticks != record.start_ticks or record.boot_id != boot_id():
        return False
    if found.dead and found.parent == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(record.pid, os.WNOHANG)
    return not found.dead


def age_s(record: ProcessRecord) -> float:
    """Seconds since the process was started; by the time since boot, which no change of the clock moves."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - record.start_ticks / os.sysconf("SC_CLK_TCK")


def send(record: ProcessRecord, signum: int) -> bool:
    """Signals the process; False if it is gone."""
    if not alive(record):
        return False
    try:
        os.kill(record.pid, signum)
    except ProcessLookupError:
        return False
    return True


def stop(record: ProcessRecord, *, run_dir: Path, grace_s: float) -> bool:
    """SIGTERM, then SIGKILL to the whole session after the grace; True if it ended by itself in time."""
    send(record, signal.SIGTERM)
    ended = wait_gone(record, grace_s)
    if not ended:
        kill(record)
        wait_gone(record, grace_s)
    forget(record, run_dir)
    return ended


def kill(record: ProcessRecord) -> None:
    """SIGKILL to the process and to what it started in its session."""
    if alive(record):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record.pid, signal.SIGKILL)


def forget(record: ProcessRecord, run_dir: Path) -> None:
    """Removes the pid file and what the process said of itself, if they are still those of this record."""
    if read(run_dir, record.name) == record:
        (run_dir / f"{record.name}{PID_SUFFIX}").unlink(missing_ok=True)
        (run_dir / f"{record.name}.json").unlink(missing_ok=True)


def wait_gone(record: ProcessRecord, timeout_s: float) -> bool:
    """Waits until the process is gone; False at the timeout."""
    end = time.monotonic() + timeout_s
    while alive(record):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


@dataclass(frozen=True)
class Stat:
    """What the kernel says of a process."""

    # Ended, but not waited for by its parent yet.
    dead: bool
    parent: int
    # Start time in clock ticks since boot.
    start_ticks: int


def stat(pid: int) -> Stat | None:
    """The process of a pid, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    # A first thread ends before the others do; while one of them is left, so are the process's files and ports.
    dead = fields[0] in "ZX" and int(fields[17]) <= 1
    return Stat(dead=dead, parent=int(fields[1]), start_ticks=int(fields[19]))


def boot_id() -> str:
    """Differs after each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def log_tail(record: ProcessRecord, lines: int = 20) -> str:
    """The last lines that the process has logged."""
    try:
        with open(record.log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(record.log_start_bytes, file.tell() - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
