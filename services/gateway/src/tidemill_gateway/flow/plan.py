"""What stays the same over all attempts of a request."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.mesh.v1.worker_pb2 import Sampling

_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice: its prompt as it travels, and its sampling with its own seed."""

    index: int
    prompt: bytes
    """Token ids, uint32 little endian."""
    prompt_tokens: int
    block_hashes: bytes
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A validated request, pinned to one revision of its model."""

    request_id: str
    """The only one of its kind in the mesh; begins with the caller's."""
    tenant: str
    model_revision: str
    choices: tuple[ChoicePlan, ...]
    deadline: float
    """By the gateway's monotonic clock."""
    tenant_weight: float = 1.0
    """Of the engine, relative to other tenants."""
    priority: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    program_id: str = ""
    traceparent: str = ""
    credit_tokens: int = 0
    """Tokens that a worker may be ahead of the client; 0: no bound, for answers that are collected here."""
    max_attempts: int = 4
    grammar_field: str = ""
    """What the caller calls the field that workers know as `sampling.grammar`."""
    sampling_prefix: str = "sampling."
    """Before the caller's names of the other fields of `sampling`."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """uint32 little endian."""
    packed = array("I", token_ids)
    assert packed.itemsize == 4, "unsigned int has 4 bytes on all platforms we run on"
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice: the caller's for the first, well apart for the others."""
    return seed if choice == 0 else (seed * 6364136223846793005 + choice * 1442695040888963407 + 1) & _MASK
