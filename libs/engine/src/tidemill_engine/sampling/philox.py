"""Philox 4x32-10, a counter-based generator: the noise of a token is a function of (seed, position, purpose) alone,
so that it does not depend on batch mates, preemption, worker or device.

Key = the 64-bit seed (low word, high word); counter = (position, purpose, 0, 0). The numpy and the torch version give
the same bits (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; Random123's test vectors hold).
"""

from typing import Final

import numpy as np
import torch

PURPOSE_SAMPLE: Final = 0
"""The draw that chooses the next token."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: Words, key: tuple[np.ndarray, np.ndarray]) -> Words:
    """Four words of each counter; all arrays hold 32-bit words as uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ k0,
            high & np.uint64(_LOW),
            (low >> np.uint64(32)) ^ c3 ^ k1,
            low & np.uint64(_LOW),
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & np.uint64(_LOW), (k1 + np.uint64(_WEYL[1])) & np.uint64(_LOW)
    return c0, c1, c2, c3


def uniform(seeds: np.ndarray, positions: np.ndarray, purpose: int = PURPOSE_SAMPLE) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits for each (seed, position); seeds are taken modulo 2^64."""
    seeds = seeds.astype(np.uint64)
    zeros = np.zeros_like(seeds)
    counter = (positions.astype(np.uint64), np.full_like(seeds, purpose), zeros, zeros)
    w0, w1, _, _ = philox(counter, (seeds & np.uint64(_LOW), seeds >> np.uint64(32)))
    bits: np.ndarray = (w0 << np.uint64(21)) | (w1 >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def uniform_torch(seeds: torch.Tensor, positions: torch.Tensor, purpose: int = PURPOSE_SAMPLE) -> torch.Tensor:
    """`uniform` on the tensors' device; seeds are int64 with the bits of the unsigned seed."""
    c0, c1 = positions.clone(), torch.full_like(positions, purpose)
    c2 = c3 = torch.zeros_like(positions)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so their bits are those of the unsigned product.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((high >> 32) & _LOW) ^ c1 ^ k0, high & _LOW, ((low >> 32) & _LOW) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53
