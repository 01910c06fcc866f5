"""What the scheduler's parts share: requests by phase, pools, timers and what is to be reported."""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from tidemill_engine.messages import Output, Report, RequestKey, RollAnswer, Suspend
from tidemill_engine.request import Request
from tidemill_engine.scheduler.fair_share import FairShare
from tidemill_engine.scheduler.id_pool import IdPool
from tidemill_engine.scheduler.in_flight import InFlightPrefixes
from tidemill_engine.scheduler.load import LoadTracker
from tidemill_engine.scheduler.output_lengths import OutputLengths
from tidemill_engine.scheduler.prefill_order import PrefillOrder, make_order
from tidemill_engine.scheduler.timers import Timers
from tidemill_engine.scheduler.waiting import WaitingQueue
from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.sequence import CachedSequence

log = structlog.get_logger("tidemill.scheduler")

_ASSUMED_STEP_S = 0.1
"""Seconds of a full step before any was measured."""


@dataclass(frozen=True)
class ModelLimits:
    """What the scheduler knows of the model."""

    context_tokens: int
    vocab_size: int
    snapshot_interval_tokens: int = 0
    """0: no per-sequence KV groups, so no sequence slots either."""
    step_tokens: int = 1
    """Most tokens that a step commits for one row."""


@dataclass(frozen=True)
class Reservation:
    """Blocks of a request that is gone or went on without them, into which a transfer may still write."""

    seq: CachedSequence
    sequence_slot: int


@dataclass
class SchedulerState:
    """All mutable state of one domain's scheduler; used by one thread."""

    settings: EngineSettings
    limits: ModelLimits
    cache: PrefixCache
    clock: Callable[[], float]

    requests: dict[RequestKey, Request] = field(default_factory=dict)
    """All that have not finished, held ones included."""
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    transferring: dict[RequestKey, Request] = field(default_factory=dict)
    """Onboarding or receiving."""
    running: dict[Request, None] = field(default_factory=dict)
    """An ordered set."""
    held: dict[RequestKey, Request] = field(default_factory=dict)
    reservations: dict[RequestKey, Reservation] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)
    freed_rows: list[int] = field(default_factory=list)
    in_flight: InFlightPrefixes = field(default_factory=InFlightPrefixes)
    timers: Timers = field(default_factory=Timers)
    load: LoadTracker = field(default_factory=LoadTracker)
    outputs: list[Output] = field(default_factory=list)
    notices: list[Report] = field(default_factory=list)
    roll_answers: list[RollAnswer] = field(default_factory=list)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    suspending: dict[RequestKey, Suspend] = field(default_factory=dict)
    """Requests to be suspended before the next step."""
    past_mark: bool = False
    """Use of the pool has passed the high-water mark: others should send elsewhere, and may take what runs here."""
    outgrown: bool = False
    """Growth has preempted somebody since the last step was planned."""
    admission_paused: bool = False
    """What is admitted has outgrown the pool: no more requests whose KV grows until there is room."""
    room_wanted: bool = False
    """The last step left a request out whose growth would have passed the mark."""
    steps_since_prefill: int = 0
    rows: IdPool = field(init=False)
    slots: IdPool = field(init=False)
    order: PrefillOrder = field(init=False)
    shares: FairShare = field(init=False)

    def __post_init__(self) -> None:
        self.order = make_order(self.settings, self.prefill_work_s)
        self.shares = FairShare(self.settings.tenant_burst_s)
        self.rows = IdPool(self.settings.max_num_seqs)
        self.slots = IdPool(self.settings.max_num_seqs if self.limits.snapshot_interval_tokens else 0)

    @property
    def has_sequence_state(self) -> bool:
        """The model keeps per-sequence KV groups."""
        return self.limits.snapshot_interval_tokens > 0

    def prefill_work_s(self, request: Request) -> float:
        """Predicted seconds to compute what is left of a prompt; none where its KV comes from prefill."""
        if request.stage == "decode":
            return 0.0
        return self._compute_s(request.num_uncached_tokens, len(request.tokens))

    def recompute_s(self, request: Request) -> float:
        """Predicted seconds to compute all its tokens anew, as if none were cached."""
        return self._compute_s(len(request.tokens), len(request.tokens))

    def token_s(self) -> float:
        """Predicted seconds between two output tokens now."""
        decoding = [len(request.tokens) for request in self.running if request.is_decoding]
        return self.load.predicted_tpot_s(decoding, self.settings.max_num_seqs) or _ASSUMED_STEP_S

    def _compute_s(self, num_last: int, num_tokens: int) -> float:
        """The last ones of so many tokens, in chunks."""
        chunk, cost = self.settings.max_num_batched_tokens, self.load.cost.model
        return (
            cost.prefill_s(num_last, num_tokens - num_last, chunk) if cost.known else num_last / chunk * _ASSUMED_STEP_S
        )

    @property
    def num_active(self) -> int:
        """Requests that run or are going to without waiting for admission again; at most max_num_seqs."""
        return len(self.running) + len(self.transferring)

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + output."""
        model = self.limits.context_tokens
        return min(self.settings.max_context_tokens or model, model)
