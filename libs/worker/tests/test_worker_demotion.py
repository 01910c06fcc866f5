"""With L3's policy "on_eviction", what L2 is about to evict goes to kvstore before it does."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from emulated_rank import GROUP, ready

from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.runs import RemovedRun
from tidemill_worker.domain_tiers import L2_COLD_SHARE, LOOKS, DomainTiers
from tidemill_worker.l2_slots import L2Block, L2Slots
from tidemill_worker.residents import StoredBlock, Tenants
from tidemill_worker.settings import WorkerSettings

SLOTS = 256
CHAIN = 3
QUEUE = 6


def make_tiers(l3: Counter[str]) -> DomainTiers:
    """Of a worker without ranks; its counts of L3's blocks go to `l3`."""
    rank = msgspec.structs.replace(ready(EngineSettings(model_dir=".")), kv_groups=[GROUP], num_host_blocks=SLOTS)
    worker: Any = SimpleNamespace(
        settings=WorkerSettings(l2_policy="off", l3_policy="on_eviction", l3_queue_blocks=QUEUE),
        counts=SimpleNamespace(l2_blocks=lambda *_: None, l3_blocks=lambda what, count: l3.update({what: count})),
    )
    domain: Any = SimpleNamespace(index=0, epoch="e", up=True, ready=[rank])
    return DomainTiers(worker, domain, SimpleNamespace(usable=dict), Tenants(), lambda *_: None)  # type: ignore[arg-type]


def fill(slots: L2Slots, number: int, parent: bytes = b"") -> bytes:
    """A block comes to L2; its hash."""
    made = slots.reserve(StoredBlock(parent, number.to_bytes(16), False, "t", number % CHAIN + 1), with_snapshot=False)
    assert made is not None
    slots.filled(made)
    return made.block_hash


async def test_what_leaves_l2_while_l3_takes_nothing_is_counted() -> None:
    counted: Counter[str] = Counter()
    tiers = make_tiers(counted)
    try:
        # Nobody takes from the queue, as nothing else has its turn meanwhile.
        for number in range(4 * SLOTS):
            fill(tiers.l2.slots, number)
            tiers.step_done()
        assert counted["dropped"] == tiers.l2.slots.unoffered_blocks == 3 * SLOTS - QUEUE
    finally:
        await tiers.close()


async def test_all_that_leaves_l2_was_offered_before_and_few_looks_find_it() -> None:
    tiers = make_tiers(Counter())
    slots, coldest, looks = tiers.l2.slots, tiers.l2.slots.coldest, 0
    offered: list[bytes] = []
    gone: list[bytes] = []

    def look(count: int) -> list[L2Block]:
        nonlocal looks
        looks += 1
        return coldest(count)

    def offer(blocks: Sequence[StoredBlock]) -> None:
        assert len(blocks) <= QUEUE, "what the queue does not take is not lost"
        offered.extend(block.block_hash for block in blocks)

    slots.coldest, tiers.l3.offer = look, offer  # type: ignore[method-assign]
    try:
        parent = b""
        for number in range(4 * SLOTS):
            parent = b"" if number % CHAIN == 0 else parent
            parent = fill(slots, number, parent)
            for _ in range(3):
                # Steps in which nothing comes.
                tiers.step_done()
            gone += [h for event in slots.take_events() if isinstance(event, RemovedRun) for h in event.hashes]
            assert set(gone) <= set(offered)
            if len(slots) * L2_COLD_SHARE < SLOTS * (L2_COLD_SHARE - 1):
                assert not offered, "there is room"
    finally:
        await tiers.close()
    assert len(gone) == 3 * SLOTS
    assert len(offered) == len(set(offered)), "each once"
    assert 0 < looks <= 4 * SLOTS / (SLOTS // L2_COLD_SHARE // LOOKS) + 1
