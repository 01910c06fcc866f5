"""How a run of blocks is cut into slabs: few large messages, several of them in flight.

A message costs 35-75 us whatever its size, so small ones cap the rate; a slab as large as the whole run would leave
gathering, sending and scattering without overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class SlabPolicy:
    """Sizes of one backend."""

    target_bytes: int
    max_bytes: int
    in_flight: int


# On loopback and Ethernet 4 MiB already reach the full rate; on NVLink it takes 16-64 MiB.
POLICIES: dict[Device, SlabPolicy] = {
    "cpu": SlabPolicy(target_bytes=4 << 20, max_bytes=16 << 20, in_flight=2),
    "cuda": SlabPolicy(target_bytes=32 << 20, max_bytes=64 << 20, in_flight=4),
}


def blocks_per_slab(block_bytes: int, policy: SlabPolicy) -> int:
    """Blocks of one slab; at least one, however large a block is."""
    assert block_bytes > 0, "a block has bytes"
    return max(1, policy.target_bytes // block_bytes)


def cut_slabs(first_block: int, num_blocks: int, block_bytes: int, policy: SlabPolicy) -> Iterator[tuple[int, int]]:
    """Yields (first block, number of blocks) of each slab; sizes differ by one block at most."""
    if num_blocks <= 0:
        return
    count = -(-num_blocks // blocks_per_slab(block_bytes, policy))
    for index in range(count):
        start = index * num_blocks // count
        yield first_block + start, (index + 1) * num_blocks // count - start
