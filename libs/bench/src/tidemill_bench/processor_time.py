"""Processor time of a process and its children, from /proc."""

import os
from pathlib import Path


def processor_s(pid: int) -> float:
    """Seconds of user and system time of a process, and of its living descendants."""
    total = 0.0
    parents: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / tick
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        total += times.get(current, 0.0)
        waiting += parents.get(current, [])
    return total
