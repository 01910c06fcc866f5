"""The tiers of one domain's epoch: what L1 holds, what of it goes down to L2 and L3, and when."""

import asyncio
from collections.abc import Callable, Sequence

from tidemill_engine import messages
from tidemill_kvcache.runs import CacheEvent
from tidemill_worker.domain import Domain
from tidemill_worker.l2 import DomainL2
from tidemill_worker.l3_offload import Offloader
from tidemill_worker.l3_stores import KvStores
from tidemill_worker.pins import DomainPins
from tidemill_worker.residents import Residents, StoredBlock, Tenants
from tidemill_worker.slabs import shape_of
from tidemill_worker.worker import Worker
from tidemill_worker.write_down import WriteDown

L2_COLD_SHARE = 8
"""With L3's policy "on_eviction", so large a part of L2 is kept copied ahead of its eviction."""
LOOKS = 8
"""At what leaves L2 next, while as much comes in as one look finds."""


class DomainTiers:
    """Follows the domain's cache events and starts the copies that they call for."""

    def __init__(
        self,
        worker: Worker,
        domain: Domain,
        stores: KvStores,
        tenants: Tenants,
        tell: Callable[[Domain, list[CacheEvent]], None],
    ) -> None:
        settings = worker.settings
        self._worker = worker
        self.domain = domain
        self._epoch = domain.epoch
        self._has_sequence_state = shape_of(domain.ready[0], settings.block_size).has_sequence_state
        self.residents = Residents(tenants)
        self.pins = DomainPins(domain)
        self.l2 = DomainL2(worker, domain, self.pins, tell)
        self.l3 = Offloader(worker, domain, stores, self.pins, self.l2)
        self._to_l2 = WriteDown(settings.l2_policy, settings.write_down_hits, self.residents)
        self._to_l3 = WriteDown(settings.l3_policy, settings.write_down_hits, self.residents)
        self._l3_follows_l2 = settings.l3_policy == "on_eviction" and self.l2.enabled
        self._look_at = 0
        """Blocks that have come to L2 before it is looked at again."""
        self._unoffered = 0
        """Blocks of L2 that left while L3's queue was full, as far as they are counted."""

    @property
    def ended(self) -> bool:
        """Whether the epoch is over, and with it the meaning of its block ids."""
        return not self.domain.up or self.domain.epoch != self._epoch

    @property
    def num_holds(self) -> dict[str, int]:
        """Copies under way."""
        return {"offloads": self.l3.num_holds, "l2_saves": self.l2.num_holds, "l2_pins": self.l2.slots.pinned_blocks}

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are here, in L1 or in L2."""
        return max(self.residents.leading(hashes), len(self.l2.leading(hashes)))

    def reach(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Leading blocks that L1 and that L2 could give to another instance: down to a snapshot, where one is needed.

        Without any it is all blocks: others may have the snapshot.
        """
        in_l2 = self.l2.leading(hashes)
        held = self.residents.leading(hashes), len(in_l2)
        if not self._has_sequence_state:
            return held
        with_snapshot = (
            self.residents.last_snapshot(hashes[: held[0]]),
            max((depth for depth, block in enumerate(in_l2, 1) if block.snapshot_slot >= 0), default=0),
        )
        return with_snapshot if any(with_snapshot) else held

    def stored(self, event: messages.BlocksStored) -> None:
        """Blocks became reusable in L1."""
        blocks = self.residents.stored(event)
        self.l2.offer(self._to_l2.stored(blocks))
        self.l3.offer(self._to_l3.stored(blocks))

    def hit(self, event: messages.BlocksHit) -> None:
        """A request found blocks in L1."""
        blocks = self.residents.hit(event.block_hashes)
        self.l2.offer(self._to_l2.hit(blocks))
        self.l3.offer(self._to_l3.hit(blocks))

    def cooling(self, event: messages.BlocksCooling) -> None:
        """L1 will evict these next."""
        self.l2.offer(self._to_l2.cooling(event.block_hashes))
        if not self._l3_follows_l2:
            self.l3.offer(self._to_l3.cooling(event.block_hashes))

    def step_done(self) -> None:
        """L3 gets what L2 will evict next, as much as it takes; the rest is offered at a later look."""
        slots = self.l2.slots
        if not self._l3_follows_l2 or slots.filled_blocks < self._look_at:
            return
        self._worker.counts.l3_blocks("dropped", slots.unoffered_blocks - self._unoffered)
        self._unoffered = slots.unoffered_blocks
        if len(slots) * L2_COLD_SHARE >= slots.num_slots * (L2_COLD_SHARE - 1):
            ahead = max(1, slots.num_slots // L2_COLD_SHARE)
            self._look_at = slots.filled_blocks + max(1, ahead // LOOKS)
            fresh = [block for block in slots.coldest(ahead) if not block.offered_down][: self.l3.room]
            for block in fresh:
                block.offered_down = True
            self.l3.offer(
                [
                    StoredBlock(block.parent, block.block_hash, block.snapshot_slot >= 0, block.tenant, block.depth)
                    for block in sorted(fresh, key=lambda block: block.depth)
                ]
            )

    def removed(self, event: messages.BlocksRemoved) -> None:
        """Blocks left L1."""
        self.residents.removed(event.block_hashes)

    def cleared(self) -> None:
        """The cache was reset: L1 and L2 forget, L3 keeps what it has."""
        self.residents.cleared()
        self.l2.cleared()

    async def close(self) -> None:
        """The epoch has ended."""
        await asyncio.gather(self.l2.close(), self.l3.close())
