"""Which blocks of a request travel next, and in which pieces. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.mesh.v1 import transfer_pb2
from tidemill_engine.kv_groups import KVGroupSpec, canonical_bytes, is_per_sequence, num_model_heads
from tidemill_engine.messages import RankReady


@dataclass(frozen=True)
class SlabRange:
    """Blocks [first_block, first_block + num_blocks) of a request; the last one may carry the sequence state."""

    first_block: int
    num_blocks: int
    with_sequence_state: bool


@dataclass(frozen=True)
class KVShape:
    """What the sizes of a domain's canonical bytes depend on."""

    groups: tuple[KVGroupSpec, ...]
    block_size: int
    dtype: str

    @property
    def has_sequence_state(self) -> bool:
        """Whether the model keeps windows or states beside its blocks."""
        return any(is_per_sequence(group) for group in self.groups)

    @property
    def num_heads(self) -> int:
        """Heads that ranges count."""
        return num_model_heads(self.groups)

    def piece_bytes(self, num_blocks: int, heads: tuple[int, int], *, with_sequence: bool, snapshots: int = 0) -> int:
        """Bytes of blocks (and sequence state or snapshots) for a head range."""
        return canonical_bytes(
            self.groups,
            self.block_size,
            num_blocks,
            *heads,
            self.dtype,
            with_sequence=with_sequence,
            num_snapshots=snapshots,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with all heads."""
        return self.piece_bytes(1, (0, self.num_heads), with_sequence=False)


def shape_of(ready: RankReady, block_size: int) -> KVShape:
    """The shape that a rank reports."""
    return KVShape(tuple(ready.kv_groups), block_size, ready.kv_dtype)


def layout_of(ready: Sequence[RankReady], block_size: int) -> transfer_pb2.KVLayout:
    """A domain's layout as its peers are told."""
    return transfer_pb2.KVLayout(
        kv_format=ready[0].kv_format,
        dtype=ready[0].kv_dtype,
        block_size=block_size,
        ranks=[
            transfer_pb2.RankLayout(
                rank=item.rank,
                transfer_address=item.transfer_address,
                head_start=item.head_start,
                head_end=item.head_end,
            )
            for item in ready
        ],
    )


def next_slab(sent: int, complete: int, total: int | None, max_blocks: int, with_sequence: bool) -> SlabRange | None:
    """The next blocks to send, None when nothing can go now.

    `sent` and `complete` count blocks from the request's start; `total` is known once the prompt is computed. While it
    computes, whatever is complete goes; the last slab carries the sequence state, alone if need be.
    """
    count = min(complete - sent, max_blocks)
    last = total is not None and sent + count == total
    if count <= 0 and not (last and with_sequence):
        return None
    return SlabRange(sent, max(0, count), last and with_sequence)
