"""Some heads of canonical bytes (see kv_pool): a stored block may have more heads than the rank that reads it."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tidemill_engine.kv_groups import KVGroupSpec, canonical_dtype, group_head_range, is_per_sequence
from tidemill_kvcache.kv_format import DTYPE_BYTES

Bytes = npt.NDArray[np.uint8]
HeadRange = tuple[int, int]


def cut_heads(
    data: Bytes,
    groups: tuple[KVGroupSpec, ...],
    block_size: int,
    heads: HeadRange,
    part: HeadRange,
    dtype: str,
    has_snapshot: Sequence[bool],
) -> Bytes:
    """The bytes of `part` out of blocks with `heads`, each followed by its snapshot where it has one, in the same form.

    `has_snapshot` has a flag for each block. Raises ValueError where `part` lies outside `heads` or sizes do not fit.
    """
    if not heads[0] <= part[0] <= part[1] <= heads[1]:
        raise ValueError(f"heads {part} are not a part of {heads}")
    pieces, offset = [], 0
    for with_snapshot in has_snapshot:
        for spec in _stored_groups(groups, with_snapshot):
            held, kept = (group_head_range(groups, spec, *bounds) for bounds in (heads, part))
            head_bytes = _head_bytes(spec, dtype)
            size = _rows(spec, block_size) * (held[1] - held[0]) * head_bytes
            if offset + size > data.nbytes:
                raise ValueError(f"{data.nbytes} bytes are too few for {len(has_snapshot)} blocks")
            by_row = data[offset : offset + size].reshape(_rows(spec, block_size), held[1] - held[0], head_bytes)
            pieces.append(by_row[:, kept[0] - held[0] : kept[1] - held[0]].reshape(-1))
            offset += size
    if offset != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes are too many for {len(has_snapshot)} blocks")
    return np.concatenate(pieces) if pieces else data


def paste_heads(
    target: Bytes,
    data: Bytes,
    groups: tuple[KVGroupSpec, ...],
    block_size: int,
    heads: HeadRange,
    part: HeadRange,
    dtype: str,
    *,
    of_snapshot: bool,
) -> None:
    """Writes the bytes of `part` into those of one block, or one snapshot, with `heads`: the reverse of `cut_heads`.

    Raises ValueError where `part` lies outside `heads` or sizes do not fit.
    """
    if not heads[0] <= part[0] <= part[1] <= heads[1]:
        raise ValueError(f"heads {part} are not a part of {heads}")
    at = offset = 0
    for spec in groups:
        if is_per_sequence(spec) != of_snapshot:
            continue
        held, given = (group_head_range(groups, spec, *bounds) for bounds in (heads, part))
        rows, head_bytes = _rows(spec, block_size), _head_bytes(spec, dtype)
        size, part_size = (rows * (end - start) * head_bytes for start, end in (held, given))
        by_row = target[at : at + size].reshape(rows, held[1] - held[0], head_bytes)
        by_row[:, given[0] - held[0] : given[1] - held[0]] = data[offset : offset + part_size].reshape(
            rows, given[1] - given[0], head_bytes
        )
        at, offset = at + size, offset + part_size
    if (at, offset) != (target.nbytes, data.nbytes):
        raise ValueError(f"{data.nbytes} bytes are no part of {target.nbytes}")


def _stored_groups(groups: tuple[KVGroupSpec, ...], with_snapshot: bool) -> Iterator[KVGroupSpec]:
    yield from (spec for spec in groups if not is_per_sequence(spec))
    if with_snapshot:
        yield from (spec for spec in groups if is_per_sequence(spec))


def _rows(spec: KVGroupSpec, block_size: int) -> int:
    """What precedes the axis of heads: layers, and planes and tokens where the group has them."""
    if spec.kind == "state":
        return len(spec.layers)
    tokens = block_size // spec.tokens_per_row if spec.kind == "paged" else spec.window_tokens
    return len(spec.layers) * spec.planes * tokens


def _head_bytes(spec: KVGroupSpec, dtype: str) -> int:
    planes = 1 if spec.kind == "state" else spec.planes
    return spec.head_values // planes * DTYPE_BYTES[canonical_dtype(spec, dtype)]
