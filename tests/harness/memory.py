"""What rounds of work leave in memory once the first of them have filled caches, pools and buffers.

Memory that levels off grows in early rounds and hardly in late ones: tests bound the late growth, by request, and never
how much there is.
"""

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

EARLY_ROUNDS = 3
LATE_ROUNDS = 3


def private_bytes(pid: int) -> int:
    """Memory that a process shares with nobody; what its allocator keeps for later counts."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))


async def late_growth(run_round: Callable[[int], Awaitable[None]], pids: dict[str, int]) -> dict[str, int]:
    """Bytes by which each process has grown in the late rounds; `run_round` is given the number of the round."""
    for number in range(EARLY_ROUNDS):
        await run_round(number)
    before = {name: private_bytes(pid) for name, pid in pids.items()}
    for number in range(EARLY_ROUNDS, EARLY_ROUNDS + LATE_ROUNDS):
        await run_round(number)
    return {name: private_bytes(pid) - before[name] for name, pid in pids.items()}


async def late_traced_growth(run_round: Callable[[int], Awaitable[None]]) -> int:
    """Bytes that Python has allocated in the late rounds of this process and that are alive after them."""
    for number in range(EARLY_ROUNDS):
        await run_round(number)
    gc.collect()
    tracemalloc.start()
    try:
        # What is replaced in later rounds was allocated before the trace began, and its end is not seen.
        await run_round(EARLY_ROUNDS)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(EARLY_ROUNDS + 1, EARLY_ROUNDS + 1 + LATE_ROUNDS):
            await run_round(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
