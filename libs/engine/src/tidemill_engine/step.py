"""The serialisable input and output of one engine step (torch-free).

The leader's scheduler makes a `SchedulerOutput`; it is the only input of a step on every rank of its cache domain.
"""

import msgspec

from tidemill_engine.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, kw_only=True):
    """First appearance of a request in a row of the runner (a first schedule, a resume, or a hand-over)."""

    row: int
    """Persistent row index of the request in the runner's tables, 0..max_num_seqs-1."""
    token_ids: list[int]
    """Prompt and output so far."""
    prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int]
    """Pool blocks so far; block i holds tokens [i * block_size, (i + 1) * block_size)."""
    sequence_slot: int = -1
    reset_sequence_state: bool = True
    """Zero the sequence slot; False when a snapshot or a hand-over has filled it."""
    grammar_consumed_token_ids: list[int] = []


class ScheduledRow(msgspec.Struct, array_like=True):
    """One row's part of the step."""

    row: int
    start: int
    """Position of the first token to compute = tokens computed so far."""
    num_tokens: int
    new_block_ids: list[int]
    """Appended to the row's block table before the step."""
    sample: bool
    """True when the step reaches the row's last known token: a next token is sampled."""


class SnapshotCopy(msgspec.Struct, array_like=True):
    """Copy between a sequence slot and the snapshot pool."""

    sequence_slot: int
    snapshot_id: int
    restore: bool
    """True: snapshot -> slot, before the forward pass; False: slot -> snapshot, after it."""


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step of a cache domain."""

    step: int
    new_requests: list[NewRequest] = []
    rows: list[ScheduledRow] = []
    """Decode rows (one token) first, then prefill chunks."""
    freed_rows: list[int] = []
    """Rows that ended since the last step; applied first."""
    snapshot_copies: list[SnapshotCopy] = []


class SampledRow(msgspec.Struct, array_like=True):
    """What the runner sampled for a row: 1..k committed tokens."""

    row: int
    token_ids: list[int]
    logprobs: list[tuple[float, int, list[int], list[float]]] = []
    """(logprob, rank, top ids, top logprobs) for each token, when asked for."""
    grammar_error: str = ""
    """Not empty: the row's constraint cannot go on."""


class StepResult(msgspec.Struct, kw_only=True):
    """Leader's view of a finished step."""

    step: int
    sampled: list[SampledRow]
    forward_s: float
    sample_s: float
