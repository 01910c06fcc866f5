"""A domain's blocks in the router's index, where each kv_format in which a store has some is a holder of its own.

So are the snapshots of a domain, or of one format in a store: they mark the blocks at whose end they were taken. A
model without window or state has none, and costs nothing for that.
"""

from collections.abc import Hashable
from typing import NamedTuple

from tidemill.mesh.v1.events_pb2 import BlockRemoved, BlockStored, SnapshotsRemoved
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.events import with_snapshot
from tidemill_kvcache.index import BlockIndex


class FormatHolder(NamedTuple):
    """What a domain has in one kv_format."""

    instance: str
    domain: int
    kv_format_id: int


class SnapshotHolder(NamedTuple):
    """The snapshots of another holder."""

    of: Hashable


class DomainBlocks:
    """Writes into the index what a domain says; formats of which it has nothing any more take no room there."""

    def __init__(self, index: BlockIndex, holder: Holder) -> None:
        self._index = index
        self._holder = holder
        self._held: set[Hashable] = set()
        self._staged: set[Hashable] = set()

    def stored(self, run: BlockStored) -> None:
        """A run of blocks came."""
        key = self._key(run.kv_format_id)
        self._held.add(key)
        self._index.stored(key, run.parent_block_hash, run.block_hashes, run.tier)
        if marked := with_snapshot(run):
            marks = SnapshotHolder(key)
            self._held.add(marks)
            self._index.mark(marks, marked, run.tier)

    def removed(self, blocks: BlockRemoved) -> None:
        """Blocks left a tier, with their snapshots."""
        key = self._key(blocks.kv_format_id)
        marks = SnapshotHolder(key)
        if marks in self._held:
            self._take(marks, blocks)
        self._take(key, blocks)

    def snapshots_removed(self, snapshots: SnapshotsRemoved) -> None:
        """Snapshots left a tier; the blocks are still there."""
        self._take(SnapshotHolder(self._key(snapshots.kv_format_id)), snapshots)

    def drop(self) -> None:
        """The domain has lost all its blocks."""
        for key in self._held:
            self._index.drop(key)
        self._held.clear()

    def stage(self, run: BlockStored) -> None:
        """As `stored`, for the list that `publish` will put in place of the present one."""
        key = self._key(run.kv_format_id)
        self._staged.add(key)
        self._index.stage(key, run.parent_block_hash, run.block_hashes, run.tier)
        if marked := with_snapshot(run):
            marks = SnapshotHolder(key)
            self._staged.add(marks)
            self._index.stage_mark(marks, marked, run.tier)

    def publish(self) -> None:
        """Replaces all that the domain has by what was staged."""
        for key in self._held | self._staged:
            self._index.publish(key)
        self._held, self._staged = self._staged, set()

    def discard_staged(self) -> None:
        """Forgets what was staged."""
        for key in self._staged:
            self._index.discard_staged(key)
        self._staged.clear()

    def _take(self, key: Hashable, gone: BlockRemoved | SnapshotsRemoved) -> None:
        self._index.removed(key, gone.block_hashes, gone.tier)
        if key in self._held and not self._index.blocks_of(key):
            self._held.discard(key)
            self._index.drop(key)

    def _key(self, kv_format_id: int) -> Hashable:
        return FormatHolder(*self._holder, kv_format_id) if kv_format_id else self._holder
