"""Names of stored KV, as the engine makes them: what can be read as what. Pure.

v1/b<tokens of a block>/<group>,<group>...; a group is <name>:<kind>:<dtype>:<layers>x<heads>x<values>[:<more>]
"""

from functools import lru_cache
from hashlib import blake2b

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one value, by dtype name."""


@lru_cache(256)
def format_id(kv_format: str) -> int:
    """A number of 64 bits that stands for a name in KV events; 0 for none."""
    return int.from_bytes(blake2b(kv_format.encode(), digest_size=8).digest(), "big") if kv_format else 0


def num_heads(kv_format: str) -> int:
    """Heads that the ranges of shards count: those of the group that has most; 0 for a name of another making."""
    heads = 0
    for group in _groups(kv_format):
        shape = group[3].split("x") if len(group) > 3 else []
        if len(shape) != 3 or not all(part.isdecimal() for part in shape):
            return 0
        heads = max(heads, int(shape[1]))
    return heads


def convertible(kv_format: str, other: str) -> bool:
    """Whether KV of one format can be turned into the other: all is equal but the dtypes of paged and window groups."""
    return _without_dtypes(kv_format) == _without_dtypes(other)


def keeps_precision(source: str, taker: str) -> bool:
    """Whether KV of one format, turned into the other, is what the taker's own pool might hold: nothing of it was
    rounded further than the taker rounds."""
    return convertible(source, taker) and all(
        one == other or _is_wider(one, other) for one, other in zip(_dtypes(source), _dtypes(taker), strict=True)
    )


def _is_wider(dtype: str, other: str) -> bool:
    known = dtype in DTYPE_BYTES and other in DTYPE_BYTES
    return known and DTYPE_BYTES[dtype] > DTYPE_BYTES[other]


def _groups(kv_format: str) -> list[list[str]]:
    return [group.split(":") for group in kv_format.split("/", 2)[-1].split(",")]


def _dtypes(kv_format: str) -> list[str]:
    return [parts[2] for parts in _groups(kv_format) if len(parts) > 2 and parts[1] != "state"]


def _without_dtypes(kv_format: str) -> list[list[str]]:
    shapes = _groups(kv_format)
    for parts in shapes:
        if len(parts) > 2 and parts[1] != "state":
            parts[2] = ""
    return [kv_format.split("/", 2)[:-1], *shapes]
