"""Reads a large checkpoint by several threads ahead of the model that is built from it, in a bounded memory.

What a model asks for is found by building it once from tensors without values (`loading.outline`). Threads read, and
bring block-scaled matrices back to numbers, in that order until what lies there unasked fills the memory. A model that
asks in another order is served all the same: what has not been begun is read when it is asked for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import structlog
import torch

from tidemill_engine.layers.elementwise import TorchElementwise
from tidemill_engine.loading.checkpoint import Checkpoint, TensorSource
from tidemill_engine.loading.outline import Outline, Unread
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.build import build_model
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.parallel.tp import TensorParallel

LEAST_BYTES = 1 << 30
"""Smaller checkpoints are read as they are asked for."""
MEMORY_BYTES = 4 << 30
"""Of tensors that were read and not asked for yet; one tensor may be larger than that alone."""
THREADS = 4
PROGRESS_S = 5.0
"""Time between two lines in the log."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Read:
    """A part of a tensor, as `TensorSource.take` names it."""

    name: str
    shape: tuple[int, ...]
    axis: int
    start: int
    end: int


def read_of(name: str, shape: Sequence[int], axis: int, start: int, end: int) -> Read:
    """One name for what several arguments of `take` stand for."""
    end = shape[axis] if end < 0 else end
    if (start, end) == (0, shape[axis]):
        axis, end = 0, shape[0]
    return Read(name, tuple(shape), axis, start, end)


class Recorder:
    """Notes what a model asks an outline for, with the bytes that it will take."""

    def __init__(self, outline: Outline) -> None:
        self.reads: dict[Read, int] = {}
        self._outline = outline

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """A tensor without values; raises CheckpointError for one that is missing or misshaped."""
        taken = self._outline.take(name, shape, axis=axis, start=start, end=end)
        self.reads[read_of(name, shape, axis, start, end)] = taken.nbytes
        return taken

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """Tables are small: the model reads them itself."""
        return self._outline.take_integers(name, shape, below)


def plan_reads(checkpoint: Checkpoint, config: ModelConfig, tp: TensorParallel) -> dict[Read, int]:
    """What a rank's model will ask for, in order, and the bytes of each."""
    recorder = Recorder(Outline(checkpoint.model_dir, checkpoint.names))
    build_model(config, WeightSource(recorder, tp, lambda name, weight, bias: Unread(), TorchElementwise()), "bfloat16")
    return recorder.reads


@contextmanager
def reading_ahead(checkpoint: Checkpoint, config: ModelConfig, tp: TensorParallel) -> Iterator[TensorSource]:
    """The checkpoint, read ahead where that is worth it; raises CheckpointError for what is missing or misshaped before
    any weight is read then."""
    if checkpoint.weight_bytes() < LEAST_BYTES:
        yield checkpoint
        return
    with ReadAhead(checkpoint, plan_reads(checkpoint, config, tp), memory_bytes=MEMORY_BYTES) as source:
        yield source


class ReadAhead:
    """A `TensorSource` over planned reads; a context manager that owns its threads."""

    def __init__(
        self,
        source: TensorSource,
        reads: dict[Read, int],
        *,
        memory_bytes: int = MEMORY_BYTES,
        threads: int = THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_held_bytes = 0
        self._source = source
        self._waiting = dict(reads)
        self._total_bytes, self._given_bytes, self._held_bytes = sum(reads.values()), 0, 0
        self._memory_bytes = memory_bytes
        self._begun: set[Read] = set()
        self._made: dict[Read, torch.Tensor | Exception] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._clock, self._told_s = clock, clock()
        self._threads = [threading.Thread(target=self._work, name=f"read-ahead-{i}") for i in range(threads)]

    def __enter__(self) -> "ReadAhead":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._made.clear()

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """As the checkpoint gives it; raises what reading it raised."""
        read = read_of(name, shape, axis, start, end)
        with self._changed:
            if read in self._begun:
                self._changed.wait_for(lambda: read in self._made)
                self._begun.remove(read)
                made = self._made.pop(read)
                self._held_bytes -= made.nbytes if isinstance(made, torch.Tensor) else 0
                self._changed.notify_all()
            else:
                self._waiting.pop(read, None)
                made = None
        if made is None:
            made = self._source.take(name, shape, axis=axis, start=start, end=end)
        if isinstance(made, Exception):
            raise made
        self._tell(made.nbytes)
        return made

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """Read when it is asked for."""
        return self._source.take_integers(name, shape, below)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._can_begin)
                if self._is_closed or not self._waiting:
                    return
                read = next(iter(self._waiting))
                expected = self._waiting.pop(read)
                self._begun.add(read)
                self._hold(expected)
            made: torch.Tensor | Exception
            try:
                taken = self._source.take(read.name, read.shape, axis=read.axis, start=read.start, end=read.end)
                # A mapped file is read when its values are touched, and that is to be here.
                made = taken.clone()
            except Exception as error:  # Whoever asks for the tensor is told.
                made = error
            with self._changed:
                self._hold((made.nbytes if isinstance(made, torch.Tensor) else 0) - expected)
                self._made[read] = made
                self._changed.notify_all()

    def _can_begin(self) -> bool:
        if self._is_closed or not self._waiting:
            return True
        expected = next(iter(self._waiting.values()))
        return self._held_bytes == 0 or self._held_bytes + expected <= self._memory_bytes

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self.most_held_bytes = max(self.most_held_bytes, self._held_bytes)

    def _tell(self, num_bytes: int) -> None:
        self._given_bytes += num_bytes
        now = self._clock()
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            log.info(
                "loading_weights",
                loaded_gib=round(self._given_bytes / 2**30, 1),
                of_gib=round(self._total_bytes / 2**30, 1),
            )
