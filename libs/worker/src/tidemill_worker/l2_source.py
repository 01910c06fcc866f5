"""A domain's own L2 as a source of blocks."""

from collections.abc import Sequence

from tidemill_worker.l2 import DomainL2
from tidemill_worker.landing import Landing
from tidemill_worker.rendezvous import chunks
from tidemill_worker.source_plan import Offer

LATENCY_S = 0.001
DEFAULT_BYTES_PER_S = 2e9
BATCH_BLOCKS = 64


class L2Source:
    """What L2 had when a request asked."""

    def __init__(self, l2: DomainL2, landing: Landing, bytes_per_s: float) -> None:
        self._l2 = l2
        blocks = [l2.slots.get(block_hash) for block_hash in landing.wanted.block_hashes]
        places = landing.snapshot_ids(range(landing.num_blocks))
        self._offer = Offer(
            "l2",
            [block is not None for block in blocks],
            [
                block is not None and block.snapshot_slot >= 0 and place >= 0
                for block, place in zip(blocks, places, strict=True)
            ],
            LATENCY_S,
            bytes_per_s,
        )

    @property
    def offer(self) -> Offer:
        return self._offer

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        for part in chunks(indices, BATCH_BLOCKS):
            blocks = []
            for index in part:
                block = self._l2.slots.get(landing.wanted.block_hashes[index])
                if block is None:
                    break
                blocks.append(block)
            held = part[: len(blocks)]
            if held:
                places = landing.snapshot_ids(held)
                good = await self._l2.load(blocks, landing.block_ids(held), places, deadline_s)
                filled = [
                    place if block.snapshot_slot >= 0 else -1
                    for block, place in zip(blocks[:good], places[:good], strict=True)
                ]
                landing.landed(held[:good], filled, "l2")
                if good < len(held):
                    return
            if len(held) < len(part):
                return
