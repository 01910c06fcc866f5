"""The feed between bus and index is bounded and survives what it cannot read."""

import asyncio
import time

from tidemill.mesh.v1.common_pb2 import TIER_L1, DomainRef
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEvent, KvEventBatch
from tidemill_kvcache.events import EventSequencer, stored_event
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import BlockIndex
from tidemill_kvcache.tracker import EventTracker
from tidemill_mesh.tasks import end, spawn
from tidemill_router import kv_feed
from tidemill_router.kv_feed import KvFeed

DOMAIN = DomainRef(instance="p-0", incarnation="i", domain=0, epoch="e")
HASHES = hash_blocks(chain_root(b"m", b""), range(2000), 1)


def live_tracker() -> tuple[BlockIndex, EventTracker]:
    index = BlockIndex(1 << 20)
    tracker = EventTracker(index, time.monotonic)
    tracker.register(DOMAIN)
    tracker.complete(tracker.begin(("p-0", 0)), DOMAIN, 0)
    return index, tracker


def batches(count: int) -> list[bytes]:
    sequencer = EventSequencer(DOMAIN, "rev", time.monotonic)
    made = []
    for i in range(count):
        batch = sequencer.batch([stored_event(HASHES[i - 1] if i else b"", [HASHES[i]], TIER_L1)])
        assert batch is not None
        made.append(batch.SerializeToString())
    return made


async def run_until_empty(feed: KvFeed) -> None:
    task = spawn(feed.run(), "feed")
    while True:
        if not feed.queued:
            break
        await asyncio.sleep(0)
    await end(task)


async def test_queued_batches_are_applied_in_order() -> None:
    index, tracker = live_tracker()
    feed = KvFeed(tracker)
    for payload in batches(2000):
        feed.on_message("s", payload)
    assert (index.num_blocks, feed.queued) == (0, 2000), "the callback only queues"
    await run_until_empty(feed)
    assert (index.num_blocks, index.orphan_runs, tracker.due()) == (2000, 0, [])


async def test_a_flood_is_bounded_and_shows_as_a_gap() -> None:
    _, tracker = live_tracker()
    feed = KvFeed(tracker)
    payloads = batches(20)
    for payload in payloads:
        feed.on_message("s", payload)
    filler = b"x" * (kv_feed.MAX_QUEUED_BYTES - sum(map(len, payloads)) + sum(map(len, payloads[:5])))
    feed.on_message("s", filler)
    assert feed.dropped == 5
    await run_until_empty(feed)
    assert tracker.counters["gaps"] == 1
    assert tracker.due() == [("p-0", 0)]


async def test_unreadable_messages_are_counted_and_the_next_batch_shows_the_gap() -> None:
    _, tracker = live_tracker()
    feed = KvFeed(tracker)
    bad = KvEvent(stored=BlockStored(block_hashes=b"seven b", tier=TIER_L1))
    good = KvEvent(stored=BlockStored(block_hashes=HASHES[0], tier=TIER_L1))
    feed.on_message("s", b"\xff\xff not a protobuf")
    feed.on_message("s", KvEventBatch(domain=DOMAIN, sequence=1, events=[bad]).SerializeToString())
    feed.on_message("s", KvEventBatch(domain=DOMAIN, sequence=2, events=[good]).SerializeToString())
    await run_until_empty(feed)
    assert feed.unreadable == 2
    assert tracker.due() == [("p-0", 0)]
