"""Budget, presence and slow disks, without a server."""

import asyncio
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tidemill.mesh.v1 import events_pb2, kvstore_pb2
from tidemill.v1 import errors_pb2
from tidemill_kvcache import snapshot_parts
from tidemill_kvcache.hashing import split_hashes
from tidemill_kvcache.runs import RemovedRun, StoredRun
from tidemill_kvstore import presence as presence_module
from tidemill_kvstore.budget import BudgetFull, ByteBudget
from tidemill_kvstore.counts import Counts
from tidemill_kvstore.gets import get
from tidemill_kvstore.kvstore import KvStore
from tidemill_kvstore.presence import Presence
from tidemill_kvstore.puts import put
from tidemill_kvstore.settings import KvStoreSettings
from tidemill_kvstore.store import SegmentStore
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_transfer.agent import new_tag, open_agent


async def test_memory_is_handed_out_in_order_of_asking():
    budget = ByteBudget(10, max_waiting=2)
    first = await budget.take(8, 60.0)
    large = asyncio.create_task(budget.take(9, 60.0))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(1, 60.0))
    await asyncio.sleep(0.01)
    assert not small.done()
    with pytest.raises(BudgetFull):
        await budget.take(1, 5.0)
    first.release()
    with await large, await small:
        assert budget.used_bytes == 10
    assert (budget.used_bytes, budget.num_waiting) == (0, 0)


async def test_who_gives_up_waiting_lets_the_next_one_in():
    budget = ByteBudget(10, max_waiting=5)
    first = await budget.take(8, 60.0)
    late = asyncio.create_task(budget.take(9, 0.05))
    cancelled = asyncio.create_task(budget.take(9, 60.0))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(2, 60.0))
    with pytest.raises(TimeoutError):
        await late
    cancelled.cancel()
    with await small:
        assert budget.used_bytes == 10
    first.release()
    assert budget.used_bytes == 0


async def test_memory_that_a_thread_still_uses_is_not_given_back():
    budget = ByteBudget(10, max_waiting=0)
    user: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with await budget.take(10, 60.0) as hold:
        hold.keep_until(user)
    assert budget.used_bytes == 10
    user.set_result(None)
    await asyncio.sleep(0)
    assert budget.used_bytes == 0


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_long_runs_are_cut_into_batches_and_snapshots_of_bounded_size(monkeypatch):
    for module in (presence_module, snapshot_parts):
        monkeypatch.setattr(module, "MAX_HASHES", 4)
    sent: list[events_pb2.KvEventBatch] = []
    presence = Presence(
        "m", "kvstore-1", "a", lambda _, data: sent.append(events_pb2.KvEventBatch.FromString(data)), lambda: 0.0
    )
    presence.begin([StoredRun(b"", hashes(90, 91))])
    presence.tell([StoredRun(b"", hashes(*range(1, 11)), kv_format_id=7), RemovedRun(hashes(1, 2, 3, 4, 5), 7)])
    presence.tell([RemovedRun(hashes(90))])
    assert [batch.sequence for batch in sent] == [1, 2, 3, 4, 5, 6]
    assert [batch.events[0].stored.kv_format_id for batch in sent[:3]] == [7] * 3
    assert [batch.events[0].removed.kv_format_id for batch in sent[3:]] == [7, 7, 0]
    assert all(len(split_hashes(batch.events[0].stored.block_hashes)) <= 4 for batch in sent)
    assert sent[1].events[0].stored.parent_block_hash == hashes(4)[0]
    messages = list(presence.snapshot())
    assert [message.last for message in messages] == [False] * (len(messages) - 1) + [True]
    assert {message.sequence for message in messages} == {6}
    held = [h for message in messages for run in message.blocks for h in split_hashes(run.block_hashes)]
    assert sorted(held) == hashes(6, 7, 8, 9, 10, 91)
    assert {run.kv_format_id for message in messages for run in message.blocks} == {0, 7}
    presence.new_incarnation("b")
    presence.tell([RemovedRun(hashes(91))])
    assert (sent[-1].sequence, sent[-1].domain.epoch) == (1, "b")


class SlowStore(SegmentStore):
    """A store whose disk stands still until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 4 << 20, 1 << 20)
        self.moving = threading.Event()
        self.reading = threading.Event()
        self.reading.set()

    def put(self, blocks):
        self.moving.wait()
        return super().put(blocks)

    def read(self, entries, out, until_s=math.inf):
        self.moving.wait()
        self.reading.wait()
        return super().read(entries, out, until_s)


async def test_a_disk_that_stands_still_holds_up_neither_the_loop_nor_calls_past_their_deadline(tmp_path):
    store = SlowStore(tmp_path)
    agent, worker = [await open_agent("tcp", "127.0.0.1") for _ in range(2)]
    published: list[bytes] = []
    presence = Presence("m", "k", "a", lambda _, data: published.append(data), time.monotonic)
    kvstore = KvStore(KvStoreSettings(), store, agent, presence, Counts(Metrics("kvstore", "k")))
    block = kvstore_pb2.BlockHeader(block_hash=b"h" * 16, kv_format="f", shard="all", size_bytes=100)

    async def put_once(deadline_s: float) -> kvstore_pb2.PutResponse:
        request = kvstore_pb2.PutRequest(
            blocks=[block], source_address=worker.address, first_tag=new_tag(), deadline_s=deadline_s, contiguous=True
        )
        sending = asyncio.create_task(worker.send(agent.address, request.first_tag, np.ones(100, np.uint8), 60.0))
        try:
            return await put(kvstore, request)
        finally:
            await sending

    with pytest.raises(MeshError) as caught:
        await put_once(4.0)
    assert caught.value.code == errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    assert kvstore.holds["inflight_bytes"] == 100
    store.moving.set()
    assert await kvstore.idle(60.0)
    kvstore.tell()
    assert len(published) == 1
    store.moving.clear()
    request = kvstore_pb2.GetRequest(
        kv_format="f", shard="all", block_hashes=b"h" * 16, dest_address=worker.address, tag=1, deadline_s=0.5
    )
    with pytest.raises(MeshError):
        await get(kvstore, request)
    store.moving.set()
    assert await kvstore.idle(60.0)
    await kvstore.close()
    await worker.close()


async def test_reads_that_the_disk_is_behind_with_hold_up_no_put_and_further_gets_are_refused_at_once(tmp_path):
    store = SlowStore(tmp_path)
    store.moving.set()
    agent, worker = [await open_agent("tcp", "127.0.0.1") for _ in range(2)]
    presence = Presence("m", "k", "a", lambda *_: None, time.monotonic)
    settings = KvStoreSettings(read_threads=1, max_queued_reads=1)
    kvstore = KvStore(settings, store, agent, presence, Counts(Metrics("kvstore", "k")))

    async def put_block(block_hash: bytes) -> kvstore_pb2.PutResponse:
        block = kvstore_pb2.BlockHeader(block_hash=block_hash, kv_format="f", shard="all", size_bytes=100)
        request = kvstore_pb2.PutRequest(
            blocks=[block], source_address=worker.address, first_tag=new_tag(), deadline_s=60.0, contiguous=True
        )
        sending = asyncio.create_task(worker.send(agent.address, request.first_tag, np.ones(100, np.uint8), 60.0))
        answer = await put(kvstore, request)
        await sending
        return answer

    def get_block(deadline_s: float):
        return get(
            kvstore,
            kvstore_pb2.GetRequest(
                kv_format="f",
                shard="all",
                block_hashes=b"h" * 16,
                dest_address=worker.address,
                tag=new_tag(),
                deadline_s=deadline_s,
            ),
        )

    assert (await put_block(b"h" * 16)).stored == [True]
    store.reading.clear()
    waiting = [asyncio.create_task(get_block(2.0)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(MeshError) as caught:
        await get_block(60.0)
    assert caught.value.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert "the disk" in caught.value.message
    assert (await put_block(b"i" * 16)).stored == [True]
    for answer in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(answer, MeshError)
        assert answer.code == errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    store.reading.set()
    assert await kvstore.idle(60.0)
    await kvstore.close()
    await worker.close()
