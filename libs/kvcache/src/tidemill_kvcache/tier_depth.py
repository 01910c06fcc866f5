"""How deep a prompt lies at many holders at once: bit masks of holders, walked down the prompt's runs.

A run's mask has three bits for each holder, one a tier. Holders that stand alike move together, so a walk costs one
comparison a run and not one a holder.
"""

from collections.abc import Iterable
from typing import NamedTuple

L1, L2, L3 = 1, 2, 3
"""Tiers, numbered as tidemill.mesh.v1.Tier."""
TIERS = (L1, L2, L3)


class TierDepth(NamedTuple):
    """Leading blocks of a prompt at a holder: `l1` from the first block on, then `l2`, then `l3` after those."""

    l1: int = 0
    l2: int = 0
    l3: int = 0

    @property
    def total(self) -> int:
        """Leading blocks in any tier."""
        return self.l1 + self.l2 + self.l3


def depths_along(holders: int, runs: Iterable[tuple[int, int]], end: int) -> list[tuple[int, TierDepth]]:
    """(holders, their depth) of a prompt of which `end` blocks lie in `runs`, given as (mask of who holds it, blocks).

    Sets of holders are given by the first bit of each; `holders` have the first block in some tier.
    """
    in_l1, depth = holders, 0
    ended: list[tuple[int, TierDepth]] = []
    lower: list[_Cohort] = []
    for mask, length in runs:
        gone = in_l1 & ~mask
        if gone or lower:
            in_l1 ^= gone
            below = gone & (mask >> 1 | mask >> 2)
            if lower or below:
                lower = _go_on(lower, mask, depth, ended)
            if below:
                _continue(lower, mask, depth, (L2, gone, depth, 0), ended)
            elif gone:
                ended.append((gone, new_depth(TierDepth, (depth, 0, 0))))
            if not in_l1 and not lower:
                return ended
        depth += length
    if in_l1:
        ended.append((in_l1, TierDepth(end)))
    return ended + [(places, _depth(tier, end, l1, l2)) for tier, places, l1, l2 in lower]


_Cohort = tuple[int, int, int, int]
"""Holders that went on in a lower tier: (tier, holders, depth of L1, depth of L2 after it)."""
new_depth = tuple.__new__
"""Makes a TierDepth in half the time of its constructor."""


def _go_on(going: list[_Cohort], mask: int, depth: int, ended: list[tuple[int, TierDepth]]) -> list[_Cohort]:
    """Those of the cohorts that also hold blocks from `depth` on; the others are added to `ended`."""
    lower: list[_Cohort] = []
    for cohort in going:
        _continue(lower, mask, depth, cohort, ended)
    return lower


def _continue(lower: list[_Cohort], mask: int, depth: int, cohort: _Cohort, ended: list[tuple[int, TierDepth]]) -> None:
    tier, places, l1, l2 = cohort
    stay = places & (mask >> (tier - 1))
    if stay:
        lower.append((tier, stay, l1, l2))
    gone = places & ~stay
    if gone and tier == L3:
        ended.append((gone, _depth(L3, depth, l1, l2)))
    elif gone:
        # Those that have not the block in L2 may have it in L3.
        _continue(lower, mask, depth, (L3, gone, l1, depth - l1), ended)


def _depth(tier: int, end: int, l1: int, l2: int) -> TierDepth:
    return TierDepth(l1, end - l1) if tier == L2 else TierDepth(l1, l2, end - l1 - l2)


def first_bits(mask: int) -> int:
    """Every third bit, set where any of the three from it on is."""
    every = mask | mask >> 1 | mask >> 2
    thirds = (1 << (3 * (mask.bit_length() // 3 + 1))) // 7
    return every & thirds
