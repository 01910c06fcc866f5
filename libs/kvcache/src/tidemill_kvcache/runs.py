"""What a cache tells the mesh: runs of blocks that came and went, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StoredRun:
    """Blocks that became reusable, each the child of the one before; `parent` is empty for a prompt's first block."""

    parent: bytes
    hashes: list[bytes] = field(default_factory=list)
    has_snapshot: list[bool] = field(default_factory=list)
    kv_format_id: int = 0
    """Of blocks in L3 (see kv_format.format_id)."""


@dataclass(slots=True)
class RemovedRun:
    """Blocks that left."""

    hashes: list[bytes] = field(default_factory=list)
    kv_format_id: int = 0


@dataclass(slots=True)
class DroppedSnapshots:
    """Snapshots that left; their blocks stay."""

    hashes: list[bytes] = field(default_factory=list)
    kv_format_id: int = 0


@dataclass(slots=True)
class Cleared:
    """All blocks left at once."""


CacheEvent = StoredRun | RemovedRun | DroppedSnapshots | Cleared


class EventLog:
    """Events since the last `take`, merged where that loses no order."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, parent: bytes, block_hash: bytes, has_snapshot: bool, kv_format_id: int = 0) -> None:
        """Appends a block, to the last run if that ends at its parent."""
        last = self._events[-1] if self._events else None
        if not (isinstance(last, StoredRun) and last.hashes[-1] == parent and last.kv_format_id == kv_format_id):
            last = StoredRun(parent, kv_format_id=kv_format_id)
            self._events.append(last)
        last.hashes.append(block_hash)
        last.has_snapshot.append(has_snapshot)

    def removed(self, block_hash: bytes, kv_format_id: int = 0) -> None:
        """Appends a removal."""
        self._append(RemovedRun, block_hash, kv_format_id)

    def snapshot_dropped(self, block_hash: bytes, kv_format_id: int = 0) -> None:
        """Appends that a block goes on without its snapshot."""
        self._append(DroppedSnapshots, block_hash, kv_format_id)

    def cleared(self) -> None:
        """Whatever was logged before no longer matters."""
        self._events = [Cleared()]

    def take(self) -> list[CacheEvent]:
        """Hands out the events and starts anew."""
        events, self._events = self._events, []
        return events

    def _append(self, kind: type[RemovedRun | DroppedSnapshots], block_hash: bytes, kv_format_id: int) -> None:
        last = self._events[-1] if self._events else None
        if not (isinstance(last, kind) and last.kv_format_id == kv_format_id):
            last = kind(kv_format_id=kv_format_id)
            self._events.append(last)
        last.hashes.append(block_hash)


def chain_runs(blocks: Sequence[tuple[bytes, bytes, bool]]) -> list[StoredRun]:
    """Groups (parent, hash, has_snapshot), given parents first, into runs, parents first."""
    runs: list[StoredRun] = []
    run_of_tail: dict[bytes, StoredRun] = {}
    for parent, block_hash, has_snapshot in blocks:
        run = run_of_tail.pop(parent, None) if parent else None
        if run is None:
            run = StoredRun(parent)
            runs.append(run)
        run.hashes.append(block_hash)
        run.has_snapshot.append(has_snapshot)
        run_of_tail[block_hash] = run
    return runs
