"""What a worker service tells its ranks."""

import msgspec

from tidemill_engine.messages.parts import EngineError, RequestKey, Stage
from tidemill_engine.sampling_params import RequestState, SamplingParams

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
