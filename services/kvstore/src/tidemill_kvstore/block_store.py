"""What a kvstore needs of the place where its blocks lie: segments on a disk, or an object store."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidemill_kvcache.runs import CacheEvent
from tidemill_kvstore.index import Entry
from tidemill_kvstore.record import RecordHeader

Bytes = npt.NDArray[np.uint8]


class BlockStore(Protocol):
    """Blocks by (kv_format, shard, block hash); any number of threads may read while one writes."""

    counters: Counter[str]

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that it may take."""

    @property
    def max_block_bytes(self) -> int:
        """Largest block with its header."""

    @property
    def used_bytes(self) -> int:
        """Bytes that it takes now."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be read."""

    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of readable blocks by tenant."""

    def take_events(self) -> list[CacheEvent]:
        """What became readable and what went since the last call, in order; the first call tells of all there is."""

    def fits(self, header: RecordHeader) -> bool:
        """Whether a block of this size is taken at all."""

    def put(self, blocks: Sequence[tuple[RecordHeader, Bytes]]) -> list[bool]:
        """Stores blocks whose checksums were verified; True for those that are stored now, or were before."""

    def peek(self, kv_format: str, shard: str, hashes: Sequence[bytes]) -> list[Entry | None]:
        """The entries of these blocks, None for those that are not here."""

    def shards(self, kv_format: str) -> list[str]:
        """Shards of which there are blocks in this format."""

    def find(self, kv_format: str, shard: str, hashes: Sequence[bytes], max_bytes: int) -> list[Entry]:
        """The leading run of these blocks, as far as it fits; they count as read."""

    def read(self, entries: Sequence[Entry], out: Bytes, until_s: float = float("inf")) -> int:
        """Reads found blocks one after the other into `out`; returns how many leading ones are whole and verified.
        Begins no block after `until_s` of the monotonic clock."""

    def check(self, entries: Sequence[Entry]) -> None:
        """Reads blocks of a batch behind one that was damaged; drops those that are damaged too."""

    def close(self) -> None:
        """Lets go of what it holds; idempotent."""
