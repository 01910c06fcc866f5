"""Where a request's wanted blocks go, and which of them have arrived, from which tier. Pure bookkeeping."""

from collections.abc import Sequence

from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_worker.slabs import KVShape


class Landing:
    """The places of one OnboardWanted; with `to_host` they are slots of L2."""

    def __init__(self, wanted: messages.OnboardWanted, shape: KVShape, *, to_host: bool = False) -> None:
        self.wanted = wanted
        self.shape = shape
        self.to_host = to_host
        self.num_blocks = len(wanted.block_hashes)
        self._from: list[str] = [""] * self.num_blocks
        self._snapshots: set[int] = set()

    def hashes(self, indices: Sequence[int]) -> list[bytes]:
        """Of wanted blocks."""
        return [self.wanted.block_hashes[index] for index in indices]

    def block_ids(self, indices: Sequence[int]) -> list[int]:
        """Pool blocks that wanted blocks go to."""
        return [self.wanted.block_ids[index] for index in indices]

    def snapshot_ids(self, indices: Sequence[int]) -> list[int]:
        """Pool snapshots of wanted blocks; -1 where there is none."""
        ids = self.wanted.snapshot_ids
        return [ids[index] if ids else -1 for index in indices]

    def places_of(self, indices: Sequence[int], has_snapshot: Sequence[bool]) -> list[int]:
        """Where the snapshots that travel go; each has a place, as both sides take them at the same boundaries."""
        places = [
            snapshot_id if travels else -1
            for snapshot_id, travels in zip(self.snapshot_ids(indices), has_snapshot, strict=True)
        ]
        if any(travels and place < 0 for place, travels in zip(places, has_snapshot, strict=True)):
            raise MeshError(errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "a stored snapshot has no slot to go to")
        return places

    def landed(self, indices: Sequence[int], snapshot_ids: Sequence[int], tier: str) -> None:
        """Every rank has these blocks in place, with the snapshots that are not -1."""
        for index, snapshot_id in zip(indices, snapshot_ids, strict=True):
            self._from[index] = tier
            if snapshot_id >= 0:
                self._snapshots.add(index)

    def has_landed(self, indices: Sequence[int]) -> bool:
        """Whether all of these have arrived."""
        return all(self._from[index] for index in indices)

    def has_snapshot(self, index: int) -> bool:
        """Whether every rank has a wanted block's snapshot in place."""
        return index in self._snapshots

    @property
    def leading(self) -> int:
        """Wanted blocks from the first one on that have arrived."""
        return next((index for index, tier in enumerate(self._from) if not tier), self.num_blocks)

    def answer(self) -> messages.OnboardReady:
        """What the engine may use: up to the last boundary with a snapshot, where the model has sequence state."""
        usable, boundary = self.leading, 0
        if self.shape.has_sequence_state:
            usable = max((index + 1 for index in self._snapshots if index < usable), default=0)
            boundary = self.wanted.first_block + usable if usable else 0
        from_l2 = sum(tier != "l3" for tier in self._from[:usable])
        return messages.OnboardReady(self.wanted.key, usable, boundary, from_l2)

    def arrived(self, usable: int) -> dict[str, int]:
        """Usable blocks by tier."""
        return {tier: self._from[:usable].count(tier) for tier in ("l2", "peer", "l3")}
