"""KV events of a worker: how a domain numbers its batches."""

from collections.abc import Callable, Iterable, Sequence

from tidemill.mesh.v1.common_pb2 import DomainRef, Tier
from tidemill.mesh.v1.events_pb2 import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from tidemill_kvcache.hashing import join_hashes

HEARTBEAT_S = 1.0
"""An idle domain repeats its sequence after so many seconds."""


def stored_event(parent: bytes, hashes: Sequence[bytes], tier: "Tier.ValueType") -> KvEvent:
    """A run of blocks came; `parent` is empty for a prompt's first block."""
    return KvEvent(stored=BlockStored(parent_block_hash=parent, block_hashes=join_hashes(hashes), tier=tier))


def removed_event(hashes: Sequence[bytes], tier: "Tier.ValueType") -> KvEvent:
    """Blocks left a tier."""
    return KvEvent(removed=BlockRemoved(block_hashes=join_hashes(hashes), tier=tier))


def cleared_event() -> KvEvent:
    """All blocks left all tiers."""
    return KvEvent(cleared=AllBlocksCleared())


class EventSequencer:
    """Numbers the batches of one epoch of a domain from 1 on."""

    def __init__(self, domain: DomainRef, model_revision: str, clock: Callable[[], float]) -> None:
        self.domain = domain
        self.sequence = 0
        self._model_revision = model_revision
        self._clock = clock
        self._sent_at = clock()

    def batch(self, events: Iterable[KvEvent]) -> KvEventBatch | None:
        """The next batch; None when there are no events."""
        listed = list(events)
        if not listed:
            return None
        self.sequence += 1
        return self._message(listed, heartbeat=False)

    def heartbeat(self) -> KvEventBatch | None:
        """Repeats the latest sequence if nothing was sent for a while."""
        if self._clock() - self._sent_at < HEARTBEAT_S:
            return None
        return self._message([], heartbeat=True)

    def _message(self, events: list[KvEvent], heartbeat: bool) -> KvEventBatch:
        self._sent_at = self._clock()
        return KvEventBatch(
            domain=self.domain,
            sequence=self.sequence,
            events=events,
            model_revision=self._model_revision,
            heartbeat=heartbeat,
        )
