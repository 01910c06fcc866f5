"""The checksum of everything that travels or is stored."""

from typing import Any

import xxhash


def checksum64(buffer: Any) -> int:
    """xxh3-64 of a contiguous buffer."""
    return int(xxhash.xxh3_64_intdigest(buffer))
