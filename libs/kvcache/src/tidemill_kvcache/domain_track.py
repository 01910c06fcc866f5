"""Where the router stands with the KV events of one domain."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import KvEventBatch

MAX_BUFFERED_BATCHES = 4096
MAX_RETIRED_IDENTITIES = 64

Holder = tuple[str, int]
"""(instance, domain)."""
Identity = tuple[str, str]
"""(incarnation, epoch)."""


def holder_of(domain: DomainRef) -> Holder:
    """Key of the domain in the index."""
    return domain.instance, domain.domain


def identity_of(domain: DomainRef) -> Identity:
    """Changes whenever the domain's cache started anew."""
    return domain.incarnation, domain.epoch


class TrackState(Enum):
    """COLD wants what it lacks from the worker, FETCHING waits for it, LIVE applies batches as they come."""

    COLD = "cold"
    FETCHING = "fetching"
    LIVE = "live"


@dataclass(slots=True, eq=False)
class DomainTrack:
    """One domain; batches that cannot be applied yet wait in `buffer`."""

    holder: Holder
    identity: Identity
    has_snapshot: bool
    """False: the publisher offers no snapshot (kvstore); after a gap its blocks are forgotten instead."""
    state: TrackState = TrackState.COLD
    sequence: int = 0
    """Of the last batch applied."""
    confirmed_at_s: float = 0.0
    """When the domain last said that `sequence` is its latest or next to latest."""
    retry_at_s: float = 0.0
    failures: int = 0
    """Snapshots in a row that did not help."""
    can_resume: bool = False
    """The index has the domain's list as of `sequence`, so what was sent since is enough."""
    resyncs: int = 0
    """Snapshots and replays that were applied."""
    gaps: int = 0
    buffer: deque[KvEventBatch] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED_BATCHES))
    retired: dict[Identity, None] = field(default_factory=dict)
    """Identities known to be over, oldest first; their late batches are refused."""
    unsettled: set[Identity] = field(default_factory=set)
    """Identities heard of that are neither the present one nor retired."""
    fetch_id: int = 0
    """Names the fetch under way, so that parts of an abandoned one are ignored."""
    settled_by_fetch: set[Identity] = field(default_factory=set)
    """Identities that the fetch under way decides on: those heard of before it was sent."""

    def retire(self, identity: Identity) -> None:
        """From now on batches of that identity are late."""
        self.retired[identity] = None
        if len(self.retired) > MAX_RETIRED_IDENTITIES:
            del self.retired[next(iter(self.retired))]
        self.unsettled.discard(identity)
        kept = [batch for batch in self.buffer if identity_of(batch.domain) != identity]
        self.buffer.clear()
        self.buffer.extend(kept)
