"""Which kvstore holds a block: rendezvous hashing, so that a store that joins or leaves moves only its own share."""

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b


def ranked(block_hash: bytes, stores: Sequence[str]) -> list[str]:
    """All stores, the block's own one first; without that one, the next would be it."""
    return sorted(stores, key=lambda store: (_score(block_hash, store), store), reverse=True)


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


def lookups(
    block_hashes: Sequence[bytes], stores: Sequence[str], choices: int, named: Collection[str] = ()
) -> dict[str, list[int]]:
    """Indices of the blocks that may lie in each store: one of their first `choices`, or one of those named."""
    everything = range(len(block_hashes))
    asked_all = [store for store in stores if store in named or len(stores) <= choices]
    found = {store: list(everything) for store in asked_all}
    if len(asked_all) == len(stores):
        return found
    for index, block_hash in enumerate(block_hashes):
        for store in ranked(block_hash, stores)[:choices]:
            if store not in asked_all:
                found.setdefault(store, []).append(index)
    return found


def chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """The indices in parts of at most `size`, in order."""
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]
