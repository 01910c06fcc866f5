"""The checksum of everything that travels or is stored."""

from collections.abc import Sequence
from typing import Any

import xxhash


def checksum64(buffer: Any) -> int:
    """xxh3-64 of a contiguous buffer."""
    return int(xxhash.xxh3_64_intdigest(buffer))


def agree(sent: Sequence[int], received: Sequence[int]) -> bool:
    """Whether pieces arrived as they were sent. 0 stands for bytes that stayed on a device, whose links check them."""
    return len(sent) == len(received) and all(
        0 in pair or pair[0] == pair[1] for pair in zip(sent, received, strict=True)
    )
