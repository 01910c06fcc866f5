"""How far a prompt can be resumed where the model keeps a window or a state for each sequence: not to the last cached
block, but to the last one at whose end there is a snapshot. Pure.

It is what a worker does: L1 is matched down to a snapshot, and from there on blocks are loaded from L2, instances and
kvstores, each from any of them, up to a block that one of them has with its snapshot. Who does not tell of snapshots,
as an older release, is credited with everything, as he was by that release.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidemill_kvcache.domain_blocks import SnapshotHolder
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.held_runs import HeldRuns
from tidemill_kvcache.index import L1, L2, L3, BlockIndex, TierDepth
from tidemill_router.loadable import Store


class Bits(NamedTuple):
    """What some have, as it stands in the index's masks."""

    blocks: int
    marks: int
    """Snapshots, at the blocks at whose end they were taken."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """One prompt of such a model."""

    index: BlockIndex
    runs: HeldRuns
    most_blocks: int
    """Leading blocks that may be reused: the last token is always computed."""
    interval_blocks: int
    """Snapshots are taken at multiples of it."""

    def own(self, holder: Holder) -> TierDepth:
        """Leading blocks of a holder down to its last snapshot, in L1 and then in L2."""
        l1 = self._last(0, *self._bits(holder, L1))
        return TierDepth(l1, self._last(l1, *self._bits(holder, L2)) - l1)

    def in_l2(self, holder: Holder) -> int:
        """Leading blocks of a holder down to its last snapshot, in L2 alone."""
        return self._last(0, *self._bits(holder, L2))

    def of_stores(self, stores: Sequence[Store], silent: Collection[str]) -> Bits:
        """Of these stores; `silent` ones do not tell of snapshots."""
        telling = [SnapshotHolder(store) for store in stores if store[0] not in silent]
        marks = self.index.bits(telling, L3) | self.index.bits([s for s in stores if s[0] in silent], L3)
        return Bits(self.index.bits(stores, L3), marks)

    def shared(self, holder: Holder, own: TierDepth, stores: Bits) -> int:
        """Leading blocks of a holder with those that stores have."""
        blocks, marks = self._bits(holder, L2)
        return self._last(own.l1, stores.blocks | blocks, stores.marks | marks)

    def computed(self, pending_blocks: int) -> int:
        """Leading blocks that a prompt under way will leave with a snapshot."""
        within = min(pending_blocks, self.most_blocks)
        return within - within % self.interval_blocks

    def _bits(self, holder: Holder, tier: int) -> Bits:
        return Bits(self.index.bits([holder], tier), self.index.bits([SnapshotHolder(holder)], tier))

    def _last(self, first: int, blocks: int, marks: int) -> int:
        """The last marked block after the first ones, all before it being there."""
        end = min(self.runs.held_from(first, blocks), self.most_blocks)
        return self.runs.last_within(first, end, marks)
