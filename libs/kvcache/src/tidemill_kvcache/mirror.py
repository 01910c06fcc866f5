"""A worker service's copy of the block list of one domain, so that it can answer GetSnapshot without its ranks."""

from tidemill.mesh.v1.common_pb2 import Tier
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEvent
from tidemill_kvcache.hashing import join_hashes, split_hashes
from tidemill_kvcache.runs import chain_runs


class BlockMirror:
    """Blocks by (tier, hash) with their parents, in order of arrival."""

    def __init__(self) -> None:
        self._parents: dict[Tier.ValueType, dict[bytes, bytes]] = {}

    def __len__(self) -> int:
        return sum(len(parents) for parents in self._parents.values())

    def apply(self, event: KvEvent) -> None:
        """Follows an event of the domain."""
        kind = event.WhichOneof("event")
        if kind == "stored":
            self._store(event.stored)
        elif kind == "removed":
            parents = self._parents.get(event.removed.tier, {})
            for block_hash in split_hashes(event.removed.block_hashes):
                parents.pop(block_hash, None)
        elif kind == "cleared":
            self._parents.clear()

    def runs(self) -> list[BlockStored]:
        """All blocks, in each tier parents before children."""
        return [
            BlockStored(parent_block_hash=run.parent, block_hashes=join_hashes(run.hashes), tier=tier)
            for tier, parents in self._parents.items()
            for run in chain_runs([(parent, block_hash, False) for block_hash, parent in parents.items()])
        ]

    def _store(self, stored: BlockStored) -> None:
        parents = self._parents.setdefault(stored.tier, {})
        parent = stored.parent_block_hash
        for block_hash in split_hashes(stored.block_hashes):
            parents.setdefault(block_hash, parent)
            parent = block_hash
