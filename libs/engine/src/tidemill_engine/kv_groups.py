"""KV groups: what a model keeps per token or per sequence, declared once, so that no other code asks for its name.

A *paged* group holds bytes for each token in blocks of the pool. *window* (ring of the last tokens) and *state* (fixed
size) groups hold bytes for each sequence, in a sequence slot; together they are the request's **sequence state**. Their
value at a block boundary is kept as a **snapshot**, without which a prefix that ends there cannot be reused.
"""

import math
from typing import Literal

import msgspec

from tidemill_kvcache.kv_format import DTYPE_BYTES

KVGroupKind = Literal["paged", "window", "state"]


class KVGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group of a model, over the whole model (all ranks)."""

    name: str
    kind: KVGroupKind
    layers: tuple[int, ...]
    dtype: str
    """Torch's name without prefix: "float32", "bfloat16"."""
    num_heads: int
    """Length of the shard axis over the whole model; 1 where the group is replicated."""
    head_values: int
    """Values for each (row, layer, head) in paged and window groups (all planes counted together: 2 x head_dim for K
    and V), for each (sequence, layer, head) in state groups."""
    sharded: bool = True
    """Split by head over TP ranks; otherwise each rank holds all of it."""
    planes: int = 2
    """paged and window: 2 for K and V, 1 where one vector is both (latents, indexer keys)."""
    tokens_per_row: int = 1
    """paged: tokens that one row stands for, more than 1 in a compressed stream. A row is there once its last token is
    computed; blocks hold whole rows, so block_size is a multiple of this."""
    window_tokens: int = 0
    """Ring length of a window group."""
    snapshot_interval_tokens: int = 0
    """window and state: snapshots are taken at multiples of this (itself a multiple of block_size)."""


def is_per_sequence(spec: KVGroupSpec) -> bool:
    """True for window and state groups."""
    return spec.kind != "paged"


def snapshot_interval_tokens(groups: tuple[KVGroupSpec, ...]) -> int:
    """Tokens between snapshots that make a prefix reusable; 0 when the model has no per-sequence group."""
    intervals = [g.snapshot_interval_tokens for g in groups if is_per_sequence(g)]
    return max(intervals, default=0)


def boundary_tokens(groups: tuple[KVGroupSpec, ...]) -> int:
    """What block_size must be a multiple of."""
    return math.lcm(*(g.tokens_per_row for g in groups))


def check_block_size(groups: tuple[KVGroupSpec, ...], block_size: int) -> None:
    """Raises ValueError when blocks would cut a row of a compressed stream, or snapshots a block."""
    boundary, interval = boundary_tokens(groups), snapshot_interval_tokens(groups)
    if block_size % boundary:
        raise ValueError(f"block_size = {block_size} is not a multiple of {boundary}, as the model's streams need")
    if interval % block_size:
        raise ValueError(
            f"block_size = {block_size} does not divide the model's snapshot interval of {interval} tokens"
        )


def kv_format(groups: tuple[KVGroupSpec, ...], block_size: int) -> str:
    """Name of the canonical stored form: what must be equal for a stored block to be read back."""
    parts = [
        f"{g.name}:{g.kind}:{g.dtype}:{len(g.layers)}x{g.num_heads}x{g.head_values}"
        + (f":w{g.window_tokens}" if g.kind == "window" else "")
        + (f":p{g.planes}" if g.planes != 2 else "")
        + (f":r{g.tokens_per_row}" if g.tokens_per_row != 1 else "")
        for g in groups
    ]
    return f"v1/b{block_size}/" + ",".join(parts)


def group_head_range(
    groups: tuple[KVGroupSpec, ...], spec: KVGroupSpec, head_start: int, head_end: int
) -> tuple[int, int]:
    """The part of a group that a head range of the model covers; all of it where the group is replicated.

    Ranges count the heads of the sharded group that has most; a group with fewer takes the proportional part.
    """
    if not spec.sharded:
        return 0, spec.num_heads
    model_heads = num_model_heads(groups)
    return head_start * spec.num_heads // model_heads, head_end * spec.num_heads // model_heads


def num_model_heads(groups: tuple[KVGroupSpec, ...]) -> int:
    """Length of the shard axis that head ranges count in."""
    return max((g.num_heads for g in groups if g.sharded), default=1)


def canonical_dtype(spec: KVGroupSpec, dtype: str) -> str:
    """Dtype of a group in canonical bytes: paged and window groups follow `dtype`, state groups keep their own."""
    return spec.dtype if spec.kind == "state" else dtype


def canonical_bytes(
    groups: tuple[KVGroupSpec, ...],
    block_size: int,
    num_blocks: int,
    head_start: int,
    head_end: int,
    dtype: str,
    *,
    with_sequence: bool = False,
    num_snapshots: int = 0,
) -> int:
    """Bytes of a piece in canonical form: blocks of all paged groups, then window and state groups once for a sequence
    slot and once for each snapshot."""
    total = 0
    for spec in groups:
        start, end = group_head_range(groups, spec, head_start, head_end)
        values = len(spec.layers) * (end - start) * spec.head_values
        if spec.kind == "paged":
            copies = num_blocks * (block_size // spec.tokens_per_row)
        else:
            copies = (int(with_sequence) + num_snapshots) * (spec.window_tokens if spec.kind == "window" else 1)
        total += copies * values * DTYPE_BYTES[canonical_dtype(spec, dtype)]
    return total
