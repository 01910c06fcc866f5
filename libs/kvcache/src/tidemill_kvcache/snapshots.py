"""Snapshots of per-sequence KV state, attached to the tree node at whose end they were taken."""

from collections import OrderedDict
from collections.abc import Callable


class SnapshotHolder:
    """What a snapshot is attached to."""

    __slots__ = ("snapshot_id", "snapshot_refs")

    def __init__(self) -> None:
        self.snapshot_id = -1
        self.snapshot_refs = 0


class SnapshotPool:
    """Snapshot ids 0..num_snapshots-1; those attached and not referenced leave in order of their last use."""

    def __init__(self, num_snapshots: int, evicted: Callable[[SnapshotHolder], None] = lambda holder: None) -> None:
        """`evicted` is told of each holder that goes on without its snapshot."""
        self.num_snapshots = num_snapshots
        self._evicted = evicted
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._evictable: OrderedDict[SnapshotHolder, None] = OrderedDict()

    @property
    def free_snapshots(self) -> int:
        """Ids that hold nothing."""
        return len(self._free)

    @property
    def evictable_snapshots(self) -> int:
        """Attached snapshots that nobody references."""
        return len(self._evictable)

    def allocate(self) -> int | None:
        """An id to fill, taken from the least recently used snapshot if need be; None when all are in use."""
        if not self._free and self._evictable:
            holder = next(iter(self._evictable))
            self.drop(holder)
            self._evicted(holder)
        return self._free.pop() if self._free else None

    def free(self, snapshot_id: int) -> None:
        """Takes back an id that is not attached."""
        self._free.append(snapshot_id)
        assert len(self._free) <= self.num_snapshots, "a snapshot was freed twice"

    def attach(self, holder: SnapshotHolder, snapshot_id: int) -> None:
        """Gives the holder its snapshot; one that it has already stays and the new one is freed."""
        if holder.snapshot_id >= 0:
            self.free(snapshot_id)
            return
        holder.snapshot_id = snapshot_id
        self._evictable[holder] = None

    def reference(self, holder: SnapshotHolder) -> int:
        """Keeps the holder's snapshot from eviction; returns its id."""
        assert holder.snapshot_id >= 0, "the node has no snapshot"
        holder.snapshot_refs += 1
        self._evictable.pop(holder, None)
        return holder.snapshot_id

    def release(self, holder: SnapshotHolder) -> None:
        """Gives a reference back; the snapshot becomes the most recently used one."""
        assert holder.snapshot_refs > 0, "a snapshot reference was given back twice"
        holder.snapshot_refs -= 1
        if holder.snapshot_refs == 0:
            self._evictable[holder] = None

    def drop(self, holder: SnapshotHolder) -> None:
        """Frees the snapshot of a holder that leaves, if it has one."""
        if holder.snapshot_id < 0:
            return
        assert holder.snapshot_refs == 0, "a referenced snapshot cannot leave"
        del self._evictable[holder]
        self.free(holder.snapshot_id)
        holder.snapshot_id = -1
