"""Messages between a worker service and its rank processes: one frame each way for a step, never one for a token.

Frames on the local socket are a 4-byte little-endian length and a msgpack body of a list of messages
(`encode_commands`/`decode_commands`, `encode_reports`/`decode_reports`). The service sends commands to the leader of a
domain, transfer commands to the rank that holds the bytes; every rank reports.
"""

from typing import Literal

import msgspec

from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.sampling_params import RequestState, SamplingParams

Stage = Literal["prefill", "decode", "whole"]
FinishReason = Literal["stop", "length", "prefilled", "aborted", "error"]


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """One choice of one attempt of one request."""

    request_id: str
    choice: int = 0
    attempt: int = 0


class EngineError(msgspec.Struct):
    """Why a request failed; `code` is the name of a tidemill.v1.ErrorCode without its prefix."""

    code: str
    message: str
    field: str = ""
    limit: str = ""


# --- service -> leader -----------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, tag=True, kw_only=True):
    """Starts a request.

    stage "prefill": compute the tokens, emit the first one, then hold the KV until Release.
    stage "decode": reserve blocks, report KVWanted, wait for KVReady (or KVFailed, which recomputes), then decode.
    stage "whole": both here.
    """

    key: RequestKey
    stage: Stage
    token_ids: list[int]
    """Prompt, then output that earlier attempts emitted."""
    prompt_tokens: int
    sampling: SamplingParams
    hash_salt: bytes = b""
    """Tenant's salt of the block-hash chain."""
    tenant: str = ""
    tenant_weight: float = 1.0
    """Share of the engine relative to other tenants', above 0."""
    priority: int = 0
    deadline_s: float = 600.0
    """Seconds left on arrival; the engine ends the request with DEADLINE_EXCEEDED after them."""
    credit_tokens: int = 1 << 30
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    hold_s: float = 30.0
    """stage "prefill": the longest time KV is held after the first token."""


class Abort(msgspec.Struct, tag=True):
    """Ends a request in whatever state it is; unknown keys are ignored."""

    key: RequestKey


class AddCredit(msgspec.Struct, tag=True):
    key: RequestKey
    tokens: int


class Release(msgspec.Struct, tag=True):
    """The KV of a held (prefilled) request is no longer needed."""

    key: RequestKey


class ExportState(msgspec.Struct, tag=True):
    """Asks for StateExported once the prompt is computed; progress comes by PrefillProgress meanwhile."""

    key: RequestKey


class Suspend(msgspec.Struct, tag=True):
    """A decoding request stands still, with its KV, so that another instance can fetch it; answered by Suspended, or by
    Stays where it does not decode now. It ends by Release (fetched), Abort or Resume, at the latest after `hold_s`."""

    key: RequestKey
    move_id: int
    hold_s: float


class Resume(msgspec.Struct, tag=True):
    """A suspended request goes on here."""

    key: RequestKey


class MoveRefused(msgspec.Struct, tag=True):
    """Answers MoveWanted: nobody has room for the request."""

    key: RequestKey


class KVReady(msgspec.Struct, tag=True):
    """All wanted blocks (and the sequence state) of a decode-stage request are in place in every rank."""

    key: RequestKey
    state: RequestState


class KVFailed(msgspec.Struct, tag=True):
    """The transfer failed. `recompute`: compute the missing KV here; otherwise the request ends with `error`."""

    key: RequestKey
    recompute: bool
    error: EngineError


class OnboardReady(msgspec.Struct, tag=True):
    """Answers OnboardWanted: the first `num_blocks` wanted blocks hold verified bytes (0: none found or failed);
    `snapshot_boundary_blocks`: boundary (in blocks of the request) whose snapshot was loaded, 0: none.
    `num_l2_blocks` of them came from an instance's memory, the others from L3."""

    key: RequestKey
    num_blocks: int
    snapshot_boundary_blocks: int = 0
    num_l2_blocks: int = 0


class PinBlocks(msgspec.Struct, tag=True):
    """Asks for the pool blocks that hold these hashes; answered by BlocksPinned, ended by UnpinBlocks."""

    pin_id: int
    block_hashes: list[bytes]


class UnpinBlocks(msgspec.Struct, tag=True):
    pin_id: int


class ResetCache(msgspec.Struct, tag=True):
    """Drops all cached blocks that no request uses; acts at once, also when idle."""


class RollCall(msgspec.Struct, tag=True):
    """All requests that the service has in this domain: others are ended; a RollAnswer says where the two differ."""

    keys: list[RequestKey]


class EmitUntil(msgspec.Struct, tag=True):
    """Output tokens of each request, of all attempts, for which its gateway has given credit so far."""

    keys: list[RequestKey]
    totals: list[int]


class Shutdown(msgspec.Struct, tag=True):
    """Ends the rank process after the current step."""


# --- service -> any rank (handled on the rank's I/O thread) -----------------------------------------------------------


class PieceSpec(msgspec.Struct, array_like=True):
    """One message of a transfer: heads [head_start, head_end) of the given blocks, gathered in canonical form."""

    peer_address: str
    tag: int
    head_start: int
    head_end: int
    size_bytes: int
    checksum: int = 0
    """xxh3-64 of the bytes; receivers verify when it is not 0."""


class SendKV(msgspec.Struct, tag=True):
    """Gather pool blocks (and a sequence slot or snapshot) into canonical form and send a piece; answered by
    TransferDone with the checksum."""

    transfer_id: int
    block_ids: list[int]
    piece: PieceSpec
    deadline_s: float
    sequence_slot: int = -1
    snapshot_ids: list[int] = []
    """Snapshots appended after the blocks, in order (kvstore objects)."""
    per_block_snapshots: bool = False
    """Bytes are laid out block by block, each followed by its snapshot where snapshot_ids[i] >= 0 (kvstore); otherwise
    all blocks, then the sequence slot."""
    from_host: bool = False
    """`block_ids` and `snapshot_ids` are slots of L2, with per_block_snapshots and the rank's whole head range."""


class RecvKV(msgspec.Struct, tag=True):
    """Receive a piece in the sender's canonical form, verify, convert and scatter it; answered by TransferDone."""

    transfer_id: int
    block_ids: list[int]
    piece: PieceSpec
    deadline_s: float
    source_dtype: str
    sequence_slot: int = -1
    snapshot_ids: list[int] = []
    per_block_snapshots: bool = False
    block_checksums: list[int] = []
    """kvstore: one for each block; a bad block and all after it are dropped."""
    keep_heads: tuple[int, int] | None = None
    """kvstore: the part of the piece's heads that the rank writes, where a stored block has more than the rank."""
    to_host: bool = False
    """`block_ids` and `snapshot_ids` are slots of L2, with per_block_snapshots, in the rank's own dtype; a slot whose
    block comes in several pieces is whole after the last of them."""


class SaveHost(msgspec.Struct, tag=True):
    """Copy pool blocks, each with its snapshot where snapshot_ids[i] >= 0, into slots of L2; answered by
    TransferDone."""

    transfer_id: int
    block_ids: list[int]
    slots: list[int]
    snapshot_ids: list[int]
    snapshot_slots: list[int]
    deadline_s: float


class LoadHost(msgspec.Struct, tag=True):
    """Copy slots of L2 into pool blocks, after a check of their checksums; answered by TransferDone, whose
    `good_blocks` leading blocks are in place."""

    transfer_id: int
    slots: list[int]
    block_ids: list[int]
    snapshot_slots: list[int]
    """-1: the block is loaded without a snapshot."""
    snapshot_ids: list[int]
    deadline_s: float


class CancelTransfer(msgspec.Struct, tag=True):
    transfer_id: int


# --- rank -> service -------------------------------------------------------------------------------------------------


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


Command = (
    Submit
    | Abort
    | AddCredit
    | Release
    | ExportState
    | Suspend
    | Resume
    | MoveRefused
    | KVReady
    | KVFailed
    | OnboardReady
    | PinBlocks
    | UnpinBlocks
    | ResetCache
    | RollCall
    | EmitUntil
    | Shutdown
    | SendKV
    | RecvKV
    | SaveHost
    | LoadHost
    | CancelTransfer
)
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

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[Command])
_report_decoder = msgspec.msgpack.Decoder(list[Report])


def encode(messages: list[Command] | list[Report]) -> bytes:
    """Body of one frame."""
    return _encoder.encode(messages)


def decode_commands(body: bytes) -> list[Command]:
    """Raises msgspec.ValidationError for anything but commands."""
    return _command_decoder.decode(body)


def decode_reports(body: bytes) -> list[Report]:
    """Raises msgspec.ValidationError for anything but reports."""
    return _report_decoder.decode(body)
