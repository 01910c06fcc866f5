"""KV groups: what a model keeps per token or per sequence, declared once, so that no other code asks for its name.

A *paged* group holds bytes for each token in blocks of the pool. *window* (ring of the last tokens) and *state* (fixed
size) groups hold bytes for each sequence, in a sequence slot; together they are the request's **sequence state**. Their
value at a block boundary is kept as a **snapshot**, without which a prefix that ends there cannot be reused.
"""

from typing import Literal

import msgspec

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
    """Values for each (token, layer, head) in paged and window groups (K and V counted together: 2 x head_dim), for
    each (sequence, layer, head) in state groups."""
    sharded: bool = True
    """Split by head over TP ranks; otherwise each rank holds all of it."""
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


def kv_format(groups: tuple[KVGroupSpec, ...], block_size: int) -> str:
    """Name of the canonical stored form: what must be equal for a stored block to be read back."""
    parts = [
        f"{g.name}:{g.kind}:{g.dtype}:{len(g.layers)}x{g.num_heads}x{g.head_values}"
        + (f":w{g.window_tokens}" if g.kind == "window" else "")
        for g in groups
    ]
    return f"v1/b{block_size}/" + ",".join(parts)
