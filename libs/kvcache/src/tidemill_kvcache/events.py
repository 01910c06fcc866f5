"""KV events of a worker: how a domain numbers its batches, and what it still knows of those it has sent."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tidemill.mesh.v1.common_pb2 import DomainRef, Tier
from tidemill.mesh.v1.events_pb2 import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    SnapshotsRemoved,
)
from tidemill_kvcache.hashing import HASH_BYTES, join_hashes

HEARTBEAT_S = 1.0
"""An idle domain repeats its sequence after so many seconds."""
HISTORY_BATCHES = 1024
HISTORY_BYTES = 2 << 20
"""What a domain keeps of its latest batches, so that a lost one can be sent again."""


def stored_event(
    parent: bytes,
    hashes: Sequence[bytes],
    tier: "Tier.ValueType",
    kv_format_id: int = 0,
    has_snapshot: Sequence[bool] = (),
) -> KvEvent:
    """A run of blocks came; `parent` is empty for a prompt's first block."""
    stored = BlockStored(
        parent_block_hash=parent, block_hashes=join_hashes(hashes), tier=tier, kv_format_id=kv_format_id
    )
    if any(has_snapshot):
        stored.snapshot_bitmap = bitmap(has_snapshot)
    return KvEvent(stored=stored)


def removed_event(hashes: Sequence[bytes], tier: "Tier.ValueType", kv_format_id: int = 0) -> KvEvent:
    """Blocks left a tier."""
    return KvEvent(removed=BlockRemoved(block_hashes=join_hashes(hashes), tier=tier, kv_format_id=kv_format_id))


def snapshots_removed_event(hashes: Sequence[bytes], tier: "Tier.ValueType", kv_format_id: int = 0) -> KvEvent:
    """Snapshots left a tier whose blocks stay."""
    return KvEvent(
        snapshots_removed=SnapshotsRemoved(block_hashes=join_hashes(hashes), tier=tier, kv_format_id=kv_format_id)
    )


def bitmap(flags: Sequence[bool]) -> bytes:
    """Bit i, little endian: flag i."""
    return np.packbits(np.array(flags, bool), bitorder="little").tobytes()


def with_snapshot(stored: BlockStored) -> bytes:
    """Packed hashes of the blocks of a run that have a snapshot, the deepest first."""
    if not stored.snapshot_bitmap:
        return b""
    count = len(stored.block_hashes) // HASH_BYTES
    bits = np.unpackbits(np.frombuffer(stored.snapshot_bitmap, np.uint8), bitorder="little")[:count]
    if bits.sum() == 1:
        at = int(bits.argmax()) * HASH_BYTES
        return bytes(stored.block_hashes[at : at + HASH_BYTES])
    hashes = np.frombuffer(stored.block_hashes, f"V{HASH_BYTES}")[: len(bits)]
    return bytes(hashes[bits.astype(bool)][::-1].tobytes())


def cleared_event() -> KvEvent:
    """All blocks left all tiers."""
    return KvEvent(cleared=AllBlocksCleared())


class EventHistory:
    """The latest batches of one identity of a domain, bounded in number and bytes; the youngest are kept."""

    def __init__(self) -> None:
        self._batches: deque[KvEventBatch] = deque()
        self._bytes = 0

    def add(self, batch: KvEventBatch) -> None:
        """A batch was sent."""
        self._batches.append(batch)
        self._bytes += batch.ByteSize()
        while len(self._batches) > HISTORY_BATCHES or self._bytes > HISTORY_BYTES:
            self._bytes -= self._batches.popleft().ByteSize()

    def clear(self) -> None:
        """What was sent so far can no longer be continued."""
        self._batches.clear()
        self._bytes = 0

    def since(self, sequence: int) -> list[KvEventBatch] | None:
        """All batches after that one; None when the first of them is no longer there."""
        if not self._batches or sequence + 1 < self._batches[0].sequence:
            return None
        return [batch for batch in self._batches if batch.sequence > sequence]


class EventSequencer:
    """Numbers the batches of one epoch of a domain from 1 on."""

    def __init__(self, domain: DomainRef, model_revision: str, clock: Callable[[], float]) -> None:
        self.sequence = 0
        self._domain = domain
        self._model_revision = model_revision
        self._clock = clock
        self._sent_at = clock()
        self._history = EventHistory()

    @property
    def domain(self) -> DomainRef:
        """The identity that batches carry."""
        return self._domain

    @domain.setter
    def domain(self, domain: DomainRef) -> None:
        self._domain = domain
        self._history.clear()

    def batch(self, events: Iterable[KvEvent]) -> KvEventBatch | None:
        """The next batch; None when there are no events."""
        listed = list(events)
        if not listed:
            return None
        self.sequence += 1
        message = self._message(listed, heartbeat=False)
        self._history.add(message)
        return message

    def heartbeat(self) -> KvEventBatch | None:
        """Repeats the latest sequence if nothing was sent for a while."""
        if self._clock() - self._sent_at < HEARTBEAT_S:
            return None
        return self._message([], heartbeat=True)

    def replay(self, known: DomainRef, sequence: int) -> list[KvEventBatch] | None:
        """The batches after one that a receiver has of that identity; None: it needs the whole list."""
        if known != self._domain or sequence > self.sequence:
            return None
        return [] if sequence == self.sequence else self._history.since(sequence)

    def _message(self, events: list[KvEvent], heartbeat: bool) -> KvEventBatch:
        self._sent_at = self._clock()
        return KvEventBatch(
            domain=self._domain,
            sequence=self.sequence,
            events=events,
            model_revision=self._model_revision,
            heartbeat=heartbeat,
        )
