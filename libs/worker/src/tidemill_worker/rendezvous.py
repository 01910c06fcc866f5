"""Which kvstore holds a block: rendezvous hashing, so that a store that joins or leaves moves only its own share.

All blocks of a prompt are scored at once: 0.4 ms for 2,048 blocks and 8 stores, on the loop that serves everybody.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tidemill_kvcache.hashing import join_hashes

# The finaliser of SplitMix64, a permutation of 64-bit words.
_SHIFTS = np.array([30, 27, 31], np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def ranked(block_hashes: Sequence[bytes], stores: Sequence[str]) -> npt.NDArray[np.intp]:
    """Indices of all stores for each block [stores, blocks], the block's own one first; without it, the next would be
    it."""
    return np.argsort(_scores(block_hashes, stores), axis=0)[::-1]


def choose(block_hash: bytes, stores: Sequence[str]) -> str:
    """The store with the highest score for a block; `stores` must not be empty."""
    return stores[ranked([block_hash], stores).item(0)]


def split(block_hashes: Sequence[bytes], stores: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the blocks by store, in order; stores without blocks are left out."""
    return lookups(block_hashes, stores, 1)


def lookups(
    block_hashes: Sequence[bytes],
    stores: Sequence[str],
    choices: int,
    named: Collection[str] = (),
    max_named_questions: int = 0,
) -> dict[str, list[int]]:
    """Indices of the blocks that may lie in each store: one of their first `choices`, or one of those named.

    Of named stores that are many, each is asked for leading blocks only, so that all are asked no more than so much.
    """
    asked = np.zeros((len(stores), len(block_hashes)), bool)
    asked[ranked(block_hashes, stores)[:choices], np.arange(len(block_hashes))] = True
    places = [place for place, store in enumerate(stores) if store in named]
    asked[places, : max_named_questions // max(1, len(places))] = True
    return {store: np.flatnonzero(row).tolist() for store, row in zip(stores, asked, strict=True) if row.any()}


def chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """The indices in parts of at most `size`, in order."""
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _scores(block_hashes: Sequence[bytes], stores: Sequence[str]) -> npt.NDArray[np.uint64]:
    seeds = np.array([_seed(store) for store in stores], np.uint64)
    scores: npt.NDArray[np.uint64] = seeds[:, None] ^ np.frombuffer(join_hashes(block_hashes), "<u8")[::2]
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        scores ^= scores >> shift
        scores *= factor
    scores ^= scores >> _SHIFTS[-1]
    return scores


@lru_cache(1024)
def _seed(store: str) -> int:
    return int.from_bytes(blake2b(store.encode(), digest_size=8).digest(), "little")
