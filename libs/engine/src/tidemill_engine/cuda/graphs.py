"""CUDA graphs of the decode step over a grid of batch sizes, in one memory pool, captured largest first."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class DecodeGraphs:
    """`bind(size)` fills static buffers with sound numbers, `record(size)` runs a decode step of so many rows over
    them, which is captured as it is."""

    def __init__(self, max_rows: int, bind: Callable[[int], None], record: Callable[[int], None]) -> None:
        self.sizes = graph_sizes(max_rows)
        self._bind = bind
        self._record = record
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int:
        """Smallest size of the grid that holds the rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def get(self, size: int) -> torch.cuda.CUDAGraph:
        """The graph of a size of the grid, captured now if it was not yet."""
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def capture_all(self) -> None:
        """Largest first, so that smaller graphs fit into the memory of larger ones."""
        gc.collect()
        for size in reversed(self.sizes):
            self.get(size)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        self._bind(size)
        # The first run compiles kernels and lets libraries take their workspaces, which a capture must not.
        self._record(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._record(size)
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collected graph or buffer would be freed on the device, which a capture does not allow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is max_rows."""
    grid = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [*(size for size in grid if size < max_rows), max_rows]
