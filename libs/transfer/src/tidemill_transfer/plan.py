"""Which heads travel from which source rank to which destination rank, for any two parallel splits. Pure."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class RankHeads(Protocol):
    """A rank and the KV heads [head_start, head_end) that it holds; `mesh.v1.RankLayout` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def head_start(self) -> int: ...

    @property
    def head_end(self) -> int: ...


class Layout(Protocol):
    """All ranks of a cache domain; `mesh.v1.KVLayout` is one."""

    @property
    def ranks(self) -> Iterable[RankHeads]: ...


class HeadPiece(NamedTuple):
    """What one source rank sends one destination rank."""

    source_rank: int
    dest_rank: int
    head_start: int
    head_end: int


def plan_pieces(source: Layout, dest: Layout) -> list[HeadPiece]:
    """The pieces that tile each destination rank's heads exactly once; ValueError when the source lacks some.

    Source ranks may hold the same heads (replicated KV heads): destinations then take turns among them.
    """
    pieces = []
    sources = sorted(source.ranks, key=lambda heads: heads.rank)
    for turn, target in enumerate(sorted(dest.ranks, key=lambda heads: heads.rank)):
        head = target.head_start
        while head < target.head_end:
            holders = [holder for holder in sources if holder.head_start <= head < holder.head_end]
            if not holders:
                raise ValueError(f"no source rank holds head {head}")
            reach = max(holder.head_end for holder in holders)
            widest = [holder for holder in holders if holder.head_end == reach]
            chosen = widest[turn % len(widest)]
            end = min(reach, target.head_end)
            pieces.append(HeadPiece(chosen.rank, target.rank, head, end))
            head = end
    return pieces
