"""Time of device work without the gaps between launches."""

from collections.abc import Callable
from statistics import median

import torch

_SKIPPED = 1
"""First replays, which may still load code."""


def graph_ms(run: Callable[[], object], replays: int = 5) -> float:
    """Median time of a captured run, in ms."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    times = []
    for _ in range(_SKIPPED + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(median(times[_SKIPPED:]))
