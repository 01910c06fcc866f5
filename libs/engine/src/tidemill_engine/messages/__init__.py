"""Messages between a worker service and its rank processes: one frame each way for a step, never one for a token.

Frames on the local socket are a 4-byte little-endian length and a msgpack body of a list of messages
(`encode`; `decode_commands`, `decode_reports`). The service sends commands to the leader of a domain, transfer commands
to the rank that holds the bytes; every rank reports.
"""

import msgspec

from tidemill_engine.messages.commands import (
    Abort,
    AddCredit,
    CancelTransfer,
    Command,
    EmitUntil,
    ExportState,
    KVFailed,
    KVReady,
    LoadHost,
    MoveRefused,
    OnboardReady,
    PieceSpec,
    PinBlocks,
    RecvKV,
    Release,
    ResetCache,
    Resume,
    RollCall,
    SaveHost,
    SendKV,
    Shutdown,
    Submit,
    Suspend,
    UnpinBlocks,
)
from tidemill_engine.messages.parts import (
    EngineError,
    FinishReason,
    RequestKey,
    Stage,
)
from tidemill_engine.messages.reports import (
    BlocksCleared,
    BlocksCooling,
    BlocksHit,
    BlocksPinned,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KVWanted,
    LoadSample,
    MoveWanted,
    OnboardWanted,
    Output,
    PrefillProgress,
    RankFailed,
    RankReady,
    Report,
    RollAnswer,
    RunawayFound,
    SnapshotsDropped,
    StateExported,
    Stays,
    StepReport,
    Suspended,
    TokenLogprobs,
    TransferDone,
    TransferFailed,
)

__all__ = [
    "Abort",
    "AddCredit",
    "BlocksCleared",
    "BlocksCooling",
    "BlocksHit",
    "BlocksPinned",
    "BlocksRemoved",
    "BlocksStored",
    "CancelTransfer",
    "Command",
    "EmitUntil",
    "EngineError",
    "ExportState",
    "FinishReason",
    "KVFailed",
    "KVReady",
    "KVWanted",
    "KvEvent",
    "LoadHost",
    "LoadSample",
    "MoveRefused",
    "MoveWanted",
    "OnboardReady",
    "OnboardWanted",
    "Output",
    "PieceSpec",
    "PinBlocks",
    "PrefillProgress",
    "RankFailed",
    "RankReady",
    "RecvKV",
    "Release",
    "Report",
    "RequestKey",
    "ResetCache",
    "Resume",
    "RollAnswer",
    "RollCall",
    "RunawayFound",
    "SaveHost",
    "SendKV",
    "Shutdown",
    "SnapshotsDropped",
    "Stage",
    "StateExported",
    "Stays",
    "StepReport",
    "Submit",
    "Suspend",
    "Suspended",
    "TokenLogprobs",
    "TransferDone",
    "TransferFailed",
    "UnpinBlocks",
    "decode_commands",
    "decode_reports",
    "encode",
]

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
