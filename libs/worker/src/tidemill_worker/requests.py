"""The requests that live on this worker, from their submit to their last trace. Pure bookkeeping."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import RequestState
from tidemill_mesh.errors import MeshError
from tidemill_worker.sessions import GatewaySession


@dataclass
class SourceProgress:
    """What a prefill-stage request has computed so far, as its rank reports it."""

    total_tokens: int
    computed_tokens: int = 0
    remaining_s: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    sequence_slot: int = -1
    final: bool = False
    state: RequestState | None = None

    def take(self, report: messages.PrefillProgress) -> None:
        """Adds a report; prefill-stage requests are never preempted, so blocks only come after blocks."""
        assert report.first_block == len(self.block_ids), "progress reports join without gap or overlap"
        self.block_ids += report.block_ids
        self.block_hashes += report.block_hashes
        self.computed_tokens = report.computed_tokens
        self.total_tokens = report.total_tokens
        self.remaining_s = report.remaining_s
        self.sequence_slot = report.sequence_slot
        self.final = report.final


@dataclass
class Move:
    """A running request that is to go on at another instance; see moves.py."""

    move_id: int
    offered_at: float
    target: common_pb2.DomainRef | None = None
    """Where there is room; None: not known yet."""
    called_off: bool = False
    """Its gateway has given it up while it is fetched: the end of the fetch decides."""


@dataclass(eq=False)
class LiveRequest:
    """One stage of one choice of a request."""

    key: messages.RequestKey
    session: GatewaySession
    domain: int
    stage: messages.Stage
    deadline_at: float
    progress: SourceProgress
    source: worker_pb2.HandOverSource | None = None
    block_sources: Sequence[common_pb2.BlockSource] = ()
    """Other instances that hold leading blocks of the prompt."""
    stores: Sequence[str] = ()
    """kvstores that have some."""
    goes_on: bool = True
    """prefill: more than the first token is wanted, so that a decode placement will be needed."""
    due_sent: bool = False
    held_until: float | None = None
    """Set once the KV waits for a decode worker (or is fetched by it)."""
    move: Move | None = None
    """decode, whole: it is offered to other instances, or stands still for one."""
    moved_at: float = float("-inf")
    """When its last move came to nothing."""
    pulling: bool = False
    released: bool = False
    """prefill: nobody will fetch the KV any more."""
    failure: MeshError | None = None
    """Set when the request has left the table: what a hand-over in progress is told."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when progress, state or failure changed; a hand-over in progress waits on it."""
    fetch: asyncio.Task[None] | None = None
    """decode: the running fetch of KV."""
    kv_answered: bool = False
    """decode: the engine was told how the fetch ended."""
    kv_answered_at_call: bool = False
    """The same at the last roll call."""

    @property
    def is_told(self) -> bool:
        """Its last output is out: prefill's KV waits for decode. One that is held for a move has more to say."""
        return self.stage == "prefill" and self.held_until is not None

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to prefill."""
        return max(0, self.progress.total_tokens - self.progress.computed_tokens)


class RequestTable:
    """All live requests, by key."""

    def __init__(self) -> None:
        self._by_key: dict[messages.RequestKey, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_key.values()))

    def __contains__(self, key: messages.RequestKey) -> bool:
        return key in self._by_key

    def add(self, request: LiveRequest) -> None:
        """Adds a request whose key is not live."""
        assert request.key not in self._by_key, f"{request.key} is live already"
        self._by_key[request.key] = request
        self._idle.clear()

    def get(self, key: messages.RequestKey) -> LiveRequest | None:
        """The live request of a key."""
        return self._by_key.get(key)

    def remove(self, request: LiveRequest, failure: MeshError) -> bool:
        """Ends a request here; False if it has ended before. `failure` is what a hand-over in progress is told."""
        if self._by_key.get(request.key) is not request:
            return False
        del self._by_key[request.key]
        if not self._by_key:
            self._idle.set()
        request.failure = failure
        request.changed.set()
        return True

    async def idle(self) -> None:
        """Waits until no request is live."""
        await self._idle.wait()

    def of_session(self, session: GatewaySession) -> list[LiveRequest]:
        """Requests of one gateway's stream."""
        return [request for request in self if request.session is session]

    def of_domain(self, domain: int) -> list[LiveRequest]:
        """Requests of one cache domain."""
        return [request for request in self if request.domain == domain]

    def prefilling(self, domain: int) -> list[LiveRequest]:
        """Prefill-stage requests of a domain that still compute, oldest first."""
        return [r for r in self if r.domain == domain and r.stage == "prefill" and r.held_until is None]

    @property
    def num_held(self) -> int:
        """Requests whose KV waits for a decode worker."""
        return sum(request.held_until is not None for request in self._by_key.values())

    @property
    def num_busy_sessions(self) -> int:
        """Gateway streams with live requests."""
        return len({id(request.session) for request in self._by_key.values()})
