"""Which heads travel from which source rank to which destination rank, for any two parallel splits. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankHeads:
    """The KV heads [head_start, head_end) that a rank holds."""

    rank: int
    head_start: int
    head_end: int


@dataclass(frozen=True)
class HeadPiece:
    """What one source rank sends one destination rank."""

    source_rank: int
    dest_rank: int
    head_start: int
    head_end: int


def plan_pieces(source: Sequence[RankHeads], dest: Sequence[RankHeads]) -> list[HeadPiece]:
    """The pieces that tile each destination rank's heads exactly once; ValueError when the source lacks some.

    Source ranks may hold the same heads (replicated KV heads): destinations then take turns among them.
    """
    pieces = []
    for turn, target in enumerate(sorted(dest, key=lambda heads: heads.rank)):
        head = target.head_start
        while head < target.head_end:
            holders = [s for s in source if s.head_start <= head < s.head_end]
            if not holders:
                raise ValueError(f"no source rank holds head {head}")
            widest = max(holder.head_end for holder in holders)
            equals = sorted((h for h in holders if h.head_end == widest), key=lambda heads: heads.rank)
            chosen = equals[turn % len(equals)]
            end = min(chosen.head_end, target.head_end)
            pieces.append(HeadPiece(chosen.rank, target.rank, head, end))
            head = end
    return pieces
