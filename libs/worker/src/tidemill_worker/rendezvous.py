"""Which kvstore holds a block: rendezvous hashing, so that a store that joins or leaves moves only its own share."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

K = TypeVar("K")


def choose(block_hash: bytes, stores: Sequence[str]) -> str:
    """The store with the highest score for a block; `stores` must not be empty."""
    return max(stores, key=lambda store: (_score(block_hash, store), store))


def _score(block_hash: bytes, store: str) -> bytes:
    return blake2b(store.encode(), key=block_hash, digest_size=8).digest()


def split(block_hashes: Iterable[bytes], stores: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the blocks by store, in order; stores without blocks are left out."""
    shares: dict[str, list[int]] = {}
    for index, block_hash in enumerate(block_hashes):
        shares.setdefault(choose(block_hash, stores), []).append(index)
    return shares


def chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """The indices in parts of at most `size`, in order."""
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def leading_of_chunks(parts: Sequence[Sequence[int]], found: Sequence[int]) -> int:
    """Leading indices found, when each part found so many leading ones of its own."""
    total = 0
    for part, count in zip(parts, found, strict=True):
        total += count
        if count < len(part):
            break
    return total


def leading_run(found: dict[str, int], shares: dict[str, list[int]], total: int) -> int:
    """Blocks from the start that are all found, when each store found so many leading ones of its share."""
    missing = [indices[found.get(store, 0)] for store, indices in shares.items() if found.get(store, 0) < len(indices)]
    return min(missing, default=total)
