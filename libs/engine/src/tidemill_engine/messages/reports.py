"""What ranks tell their worker service."""

import msgspec

from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages.parts import EngineError, FinishReason, RequestKey
from tidemill_engine.sampling_params import RequestState


class RankReady(msgspec.Struct, tag=True, kw_only=True):
    """First report of a rank: weights are loaded, a warm-up step has run."""

    rank: int
    transfer_address: str
    head_start: int
    head_end: int
    num_blocks: int
    num_snapshots: int
    kv_dtype: str
    kv_groups: list[KVGroupSpec]
    kv_format: str
    kv_bytes_per_token: int
    load_seconds: float
    backend: str
    """For example "cpu/torch-reference/q4_1"."""
    num_host_blocks: int = 0
    """Slots of L2."""
    num_host_snapshots: int = 0


class TokenLogprobs(msgspec.Struct, array_like=True):
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step gave one request."""

    key: RequestKey
    first_position: int
    """Index of token_ids[0] among the request's output tokens, those of earlier attempts included."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    error: EngineError | None = None
    cached_l1: int = -1
    """With the first output of an attempt: prompt tokens not computed again; -1 elsewhere."""
    cached_l2: int = 0
    cached_l3: int = 0
    queue_s: float = 0.0


class BlocksStored(msgspec.Struct, tag=True):
    """A run of full blocks became reusable in L1, each the child of the one before."""

    parent_hash: bytes
    block_hashes: list[bytes]
    has_snapshot: list[bool]


class BlocksRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]


class SnapshotsDropped(msgspec.Struct, tag=True):
    """Snapshots left L1; the blocks at whose ends they were taken stay."""

    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, tag=True):
    pass


KvEvent = BlocksStored | BlocksRemoved | SnapshotsDropped | BlocksCleared


class BlocksHit(msgspec.Struct, tag=True):
    """A request found these leading blocks in L1; only with `report_hits`."""

    block_hashes: list[bytes]


class BlocksCooling(msgspec.Struct, tag=True):
    """These blocks will be evicted next, in this order; only with `cooling_blocks`, and each once until it is used."""

    block_hashes: list[bytes]


class LoadSample(msgspec.Struct, kw_only=True):
    """State of a domain after a step."""

    waiting_requests: int
    running_requests: int
    held_requests: int
    waiting_prefill_tokens: int
    total_blocks: int
    free_blocks: int
    available_blocks: int
    cached_blocks: int
    pinned_blocks: int
    used_blocks: int
    """Referenced by requests, holds or pins."""
    prefill_tokens_per_s: float
    decode_step_s: float
    predicted_ttft_s: float
    measured_ttft_s: float
    predicted_tpot_s: float
    measured_tpot_s: float
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    runaways_total: int = 0
    admission_paused: bool = False
    """Requests whose KV grows have to wait for room."""
    degraded: list[str] = []
    """Steps of degraded service that are on."""
    step_cost: list[float] = []
    """Fields of tidemill_kvcache.step_cost.StepCost, in order; empty: not known."""
    context_tokens: int = 0
    """Sum of the lengths, so far, of waiting and running requests."""


class StepReport(msgspec.Struct, tag=True, kw_only=True):
    """All that a step (or an idle tick, at most one second apart) of a leader brought."""

    step: int
    outputs: list[Output] = []
    kv_events: list[KvEvent] = []
    load: LoadSample | None = None


class PrefillProgress(msgspec.Struct, tag=True):
    """A prefill-stage request has KV for `computed_tokens` tokens, in these pool blocks.

    Sent at admission and after each of its chunks, with the blocks that became complete since the last; the final one
    has `final` set and holds the partial block too.
    """

    key: RequestKey
    computed_tokens: int
    total_tokens: int
    first_block: int
    block_ids: list[int]
    block_hashes: list[bytes]
    remaining_s: float
    final: bool
    sequence_slot: int = -1


class StateExported(msgspec.Struct, tag=True):
    key: RequestKey
    state: RequestState


class MoveWanted(msgspec.Struct, tag=True):
    """This request should go on where there is room: its domain runs out of blocks. It goes on here meanwhile."""

    key: RequestKey


class Suspended(msgspec.Struct, tag=True):
    """The request stands still. Its outputs were reported before; `block_ids` hold all of its computed tokens."""

    key: RequestKey
    move_id: int
    block_ids: list[int]
    block_hashes: list[bytes]
    """Of the full ones."""
    sequence_slot: int
    state: RequestState


class Stays(msgspec.Struct, tag=True):
    """The request cannot be suspended now: it waits, or computes its prompt."""

    key: RequestKey
    move_id: int


class KVWanted(msgspec.Struct, tag=True):
    """A decode-stage request has reserved blocks: it holds `have_blocks` leading ones from its own cache and wants the
    rest (partial last block included) into `block_ids`."""

    key: RequestKey
    have_blocks: int
    have_hash: bytes
    block_ids: list[int]
    sequence_slot: int


class OnboardWanted(msgspec.Struct, tag=True):
    """A waiting request lacks these blocks of its prompt; the service may fill leading ones from L3 into `block_ids`
    (snapshots into `snapshot_ids`) and must answer with OnboardReady within `deadline_s`."""

    key: RequestKey
    first_block: int
    parent_hash: bytes
    block_hashes: list[bytes]
    block_ids: list[int]
    snapshot_ids: list[int]
    deadline_s: float


class RunawayFound(msgspec.Struct, tag=True):
    """A request's output repeats itself or has got far longer than its class's: it gives way first when room is short,
    and is the one to move to where there is room."""

    key: RequestKey
    output_tokens: int
    reason: str


class RollAnswer(msgspec.Struct, tag=True):
    """What a RollCall found; not sent when there is nothing to say."""

    missing: list[RequestKey]
    """Not here, or so damaged that nothing would have come of them; whatever they held is given back."""
    receiving: list[RequestKey]
    """Wait for KVReady or KVFailed."""
    held: list[RequestKey]
    """Have their last output behind them, or are suspended."""
    num_unowned: int
    """Ended here, since the service does not have them."""
    num_uncredited: int = 0
    """Stood still though their gateways had given credit; they go on."""


class BlocksPinned(msgspec.Struct, tag=True):
    """Pool blocks (and snapshots, -1: none) of the leading hashes that are still cached."""

    pin_id: int
    block_ids: list[int]
    snapshot_ids: list[int]


class TransferDone(msgspec.Struct, tag=True):
    """`checksum`: of the bytes sent. `good_blocks`: leading blocks received and verified."""

    transfer_id: int
    size_bytes: int
    seconds: float
    checksum: int = 0
    good_blocks: int = 0


class TransferFailed(msgspec.Struct, tag=True):
    transfer_id: int
    error: EngineError


class RankFailed(msgspec.Struct, tag=True):
    """Last words of a rank; a rank may also just be gone."""

    rank: int
    message: str


Report = (
    RankReady
    | StepReport
    | PrefillProgress
    | StateExported
    | MoveWanted
    | Suspended
    | Stays
    | KVWanted
    | OnboardWanted
    | RunawayFound
    | RollAnswer
    | BlocksPinned
    | BlocksHit
    | BlocksCooling
    | TransferDone
    | TransferFailed
    | RankFailed
)
