"""Puts and gets of a real kvstore process, over real agents, with real etcd and NATS."""

import asyncio
import signal
import subprocess
import sys

import grpc
import numpy as np
import pytest

from tidemill.mesh.v1 import common_pb2, events_pb2, kvstore_pb2, membership_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_kvcache.hashing import split_hashes
from tidemill_kvcache.kv_format import format_id
from tidemill_mesh import request_ids
from tidemill_mesh.bus import Bus
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_mesh.load import kv_subject
from tidemill_mesh.membership import InstanceView
from tidemill_mesh.metrics import Metrics
from tidemill_transfer.agent import TransferError, new_tag, new_tags, open_agent
from tidemill_transfer.checksum import checksum64

FORMAT = "v1/b16/kv"


def bytes_of(number: int, size: int = 5000) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def header_of(number: int, size: int = 5000, **changes) -> kvstore_pb2.BlockHeader:
    values = {
        "block_hash": hash_of(number),
        "parent_block_hash": hash_of(number - 1) if number > 1 else b"",
        "kv_format": FORMAT,
        "shard": "all",
        "size_bytes": size,
        "checksum": checksum64(bytes_of(number, size)),
        "num_tokens": 16,
    }
    return kvstore_pb2.BlockHeader(**{**values, **changes})


class Worker:
    """The other side of puts and gets."""

    def __init__(self, agent, stub, kv_format: str = FORMAT) -> None:
        self.agent = agent
        self.stub = stub
        self.kv_format = kv_format
        self.store_address = ""

    async def put(self, headers, *, contiguous: bool = True, data=None, deadline_s: float = 120.0, tenant: str = ""):
        for header in headers:
            header.kv_format = self.kv_format
        payloads = [bytes_of(int.from_bytes(h.block_hash, "big"), h.size_bytes) for h in headers]
        payloads = payloads if data is None else data
        messages = [np.concatenate(payloads)] if contiguous else payloads
        tag = new_tags(len(messages))
        request = kvstore_pb2.PutRequest(
            blocks=headers,
            source_address=self.agent.address,
            first_tag=tag,
            deadline_s=deadline_s,
            contiguous=contiguous,
            tenant=tenant,
        )
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(self.call(self.stub.Put(request, metadata=request_ids.outgoing())))
            for index, message in enumerate(messages):
                group.create_task(self.agent.send(self.store_address, tag + index, message, deadline_s))
        return answer.result()

    async def get(self, numbers, *, shard: str = "all", max_bytes: int = 0):
        request = kvstore_pb2.GetRequest(
            kv_format=self.kv_format,
            shard=shard,
            block_hashes=b"".join(map(hash_of, numbers)),
            dest_address=self.agent.address,
            tag=new_tag(),
            deadline_s=120.0,
            max_bytes=max_bytes,
        )
        answer = await self.call(self.stub.Get(request, metadata=request_ids.outgoing()))
        if not answer.blocks:
            return []
        out = np.zeros(answer.size_bytes, np.uint8)
        await self.agent.recv(self.store_address, request.tag, out, 120.0)
        found, offset = [], 0
        for header in answer.blocks:
            payload = out[offset : offset + header.size_bytes]
            offset += header.size_bytes
            assert checksum64(payload) == header.checksum
            found.append((int.from_bytes(header.block_hash, "big"), payload.tobytes()))
        return found

    async def call(self, rpc):
        try:
            return await rpc
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def idle(self) -> bool:
        while True:
            status = await self.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
            if not any(status.holds.values()):
                return True
            await asyncio.sleep(0.05)


def expected(numbers, size: int = 5000):
    return [(number, bytes_of(number, size).tobytes()) for number in numbers]


async def until(condition) -> None:
    """Waits for a state that no event announces."""
    while not condition():
        await asyncio.sleep(0.02)


async def record_of(settings, instance: str, endpoint: str) -> membership_pb2.MembershipRecord:
    """The store's record, once the mesh shows it."""
    view = InstanceView(settings)
    await view.start()
    await until(lambda: instance in view.records and view.records[instance].endpoint == endpoint)
    record = view.records[instance]
    await view.close()
    return record


@pytest.fixture
def join(agent, connect, mesh_settings):
    """Makes this process a worker of a running kvstore, found by membership."""

    async def run(kvstore, endpoint, our_agent=agent) -> Worker:
        worker = Worker(our_agent, connect(endpoint)[0])
        worker.record = await record_of(mesh_settings, kvstore.instance, endpoint)
        worker.store_address = worker.record.transfer_address
        return worker

    return run


@pytest.fixture
async def worker(shared_kvstore, agent, connect, request) -> Worker:
    """A worker of the shared kvstore; each test has a kv_format, and so blocks, of its own."""
    kvstore, endpoint, settings = shared_kvstore
    worker = Worker(agent, connect(endpoint)[0], kv_format=request.node.name)
    worker.store_address = (await record_of(settings, kvstore.instance, endpoint)).transfer_address
    return worker


async def test_blocks_go_in_and_come_back_as_a_leading_run(worker):
    assert list((await worker.put([header_of(i) for i in range(1, 6)])).stored) == [True] * 5
    assert list((await worker.put([header_of(i) for i in (7, 8)], contiguous=False)).stored) == [True] * 2
    assert await worker.get(range(1, 9)) == expected(range(1, 6))
    assert await worker.get([7, 8]) == expected([7, 8])
    assert await worker.get(range(1, 6), max_bytes=12000) == expected([1, 2])
    assert await worker.get([6]) == []
    assert await worker.get([1], shard="0-2") == []
    assert await worker.idle()


async def test_over_ucx_too(start_kvstore, join):
    kvstore = start_kvstore(transport="ucx")
    endpoint = kvstore.start()
    ucx = await open_agent("ucx", "127.0.0.1")
    worker = await join(kvstore, endpoint, ucx)
    numbers = range(1, 9)
    assert all((await worker.put([header_of(i, 600_000) for i in numbers])).stored)
    gets = await asyncio.gather(*(worker.get(numbers) for _ in range(4)))
    assert all(found == expected(numbers, 600_000) for found in gets)
    assert await worker.idle()
    await ucx.close()


async def test_has_tells_the_leading_run_and_its_snapshots(worker):
    await worker.put([header_of(1), header_of(2, has_snapshot=True), header_of(3)])
    hashes = b"".join(map(hash_of, range(1, 9)))
    request = kvstore_pb2.HasRequest(kv_format=worker.kv_format, shard="all", block_hashes=hashes)
    answer = await worker.stub.Has(request)
    assert (answer.num_blocks, answer.snapshot_bitmap, answer.size_bytes) == (3, b"\x02", 15000)
    assert list(answer.shards) == ["all"]
    other = kvstore_pb2.HasRequest(kv_format=worker.kv_format, shard="0-2", block_hashes=hashes)
    answer = await worker.stub.Has(other)
    assert (answer.num_blocks, list(answer.shards)) == (0, ["all"])


async def test_a_checksum_may_be_left_to_the_store_but_a_wrong_one_is_refused(worker, shared_kvstore):
    with request_ids.logged_as("offload-9"):
        answer = await worker.put([header_of(1, checksum=0), header_of(2, checksum=99), header_of(3)])
    assert "request_id=offload-9" in line_of(shared_kvstore[0], "blocks arrived with other bytes than were sent")
    assert list(answer.stored) == [True, False, True]
    assert answer.error.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert await worker.get([1]) == expected([1])
    assert await worker.get([2]) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_hash": b"short"}, "blocks[0].block_hash"),
        ({"parent_block_hash": b"short"}, "blocks[0].parent_block_hash"),
        ({"size_bytes": 0}, "blocks[0].size_bytes"),
        ({"size_bytes": -1}, "blocks[0].size_bytes"),
        ({"kv_format": ""}, "blocks[0]"),
        ({"size_bytes": 1 << 20}, "blocks[0].size_bytes"),
        ({"size_bytes": 1 << 40}, "blocks"),
    ],
)
async def test_a_wrong_put_is_refused_by_field(worker, changes, field):
    request = kvstore_pb2.PutRequest(
        blocks=[header_of(1, **changes)], source_address="tcp://127.0.0.1:1/x", deadline_s=5.0, contiguous=True
    )
    with pytest.raises(MeshError) as caught:
        await worker.call(worker.stub.Put(request))
    assert caught.value.field == field


async def test_a_put_whose_bytes_never_come_ends_at_its_deadline_and_is_never_readable(worker):
    request = kvstore_pb2.PutRequest(
        blocks=[header_of(1)],
        source_address=worker.agent.address,
        first_tag=new_tag(),
        deadline_s=0.5,
        contiguous=True,
    )
    put = asyncio.ensure_future(worker.call(worker.stub.Put(request)))
    await asyncio.sleep(0.2)
    assert await worker.get([1]) == []
    with pytest.raises(MeshError) as caught:
        await put
    assert caught.value.code == errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    assert await worker.get([1]) == []
    assert await worker.idle()


async def test_a_get_that_nobody_fetches_gives_its_memory_back(worker):
    await worker.put([header_of(1)])
    name = {"kv_format": worker.kv_format, "shard": "all", "block_hashes": hash_of(1)}
    for dest in (worker.agent.address, "tcp://127.0.0.1:1/gone"):
        request = kvstore_pb2.GetRequest(**name, dest_address=dest, tag=new_tag(), deadline_s=4.0)
        assert (await worker.stub.Get(request)).size_bytes == 5000
    assert await worker.idle()
    assert await worker.get([1]) == expected([1])


async def test_a_cancelled_put_leaves_nothing_behind(worker):
    request = kvstore_pb2.PutRequest(
        blocks=[header_of(1)], source_address=worker.agent.address, first_tag=9, deadline_s=120.0, contiguous=True
    )
    put = worker.stub.Put(request)
    await asyncio.sleep(0.2)
    put.cancel()
    assert await worker.idle()


async def test_many_puts_and_gets_share_little_memory(worker):
    answers = await asyncio.gather(*(worker.put([header_of(i, 300_000)]) for i in range(1, 25)))
    assert all(answer.stored[0] for answer in answers)
    found = await asyncio.gather(*(worker.get([i]) for i in range(1, 25)))
    assert [run[0] for run in found] == expected(range(1, 25), 300_000)
    assert await worker.idle()


async def test_calls_beyond_the_line_are_refused_with_a_time_to_retry(worker):
    def stuck() -> kvstore_pb2.PutRequest:
        return kvstore_pb2.PutRequest(
            blocks=[header_of(1, 1_000_000)],
            source_address=worker.agent.address,
            first_tag=new_tag(),
            deadline_s=120.0,
            contiguous=True,
        )

    puts = [asyncio.ensure_future(worker.call(worker.stub.Put(stuck()))) for _ in range(24)]
    await until(lambda: sum(put.done() for put in puts) >= 2)
    await worker.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
    for put in puts:
        put.cancel()
    ended = await asyncio.gather(*puts, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, MeshError)]
    assert [error.code for error in refused] == [errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED] * 2
    assert all(error.retry_after_s > 0 for error in refused)
    assert await worker.idle()


async def test_blocks_survive_kill_9_and_the_folder_serves_one_process(start_kvstore, join):
    kvstore = start_kvstore()
    worker = await join(kvstore, kvstore.start())
    first = worker.record.incarnation
    await worker.put([header_of(i) for i in range(1, 20)])
    second = start_kvstore()
    second.instance = "kvstore-2"
    with pytest.raises(AssertionError, match="used by another process"):
        second.start()
    kvstore.end(signal.SIGKILL)
    with pytest.raises((MeshError, TransferError, ExceptionGroup)):
        await worker.put([header_of(99)], deadline_s=2.0)
    worker = await join(kvstore, kvstore.start())
    assert worker.record.incarnation != first
    assert await worker.get(range(1, 20)) == expected(range(1, 20))


def line_of(kvstore, event: str) -> str:
    """The first log line that tells this."""
    return next(line for line in kvstore.log.splitlines() if event in line)


@pytest.mark.full
async def test_a_tenants_quota_is_what_the_settings_say(start_kvstore, join):
    kvstore = start_kvstore(tenant_quota_bytes=30_000, tenant_quotas="small=10000")
    worker = await join(kvstore, await asyncio.to_thread(kvstore.start))
    for number in range(1, 5):
        await worker.put([header_of(number)], tenant="small")
        await worker.put([header_of(number + 10)], tenant="other")
    assert await worker.get([4]) == expected([4])
    assert [number for number in range(1, 5) if await worker.get([number])] == [3, 4]
    status = await worker.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
    assert dict(status.tenant_bytes) == {"small": 10_000, "other": 20_000}


@pytest.mark.full
async def test_one_damaged_block_has_its_neighbours_looked_at(start_kvstore, join):
    kvstore = start_kvstore(log_level="debug")
    worker = await join(kvstore, await asyncio.to_thread(kvstore.start))
    await worker.put([header_of(i) for i in range(1, 7)])
    damage(next((kvstore.folder / "data").glob("*.segment")))
    with request_ids.logged_as("trace-1"):
        assert await worker.get(range(1, 7)) == []
    assert await worker.idle()
    status = await worker.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
    assert (status.blocks, status.counters["damaged_blocks"]) == (0, 6)
    # Of the call, and of a thread that read for it.
    for event in ("blocks read", "is damaged"):
        assert "request_id=trace-1" in line_of(kvstore, event)
    assert "request_id" not in line_of(kvstore, "blocks put")
    await worker.put([header_of(i) for i in range(1, 7)])
    assert await worker.get(range(1, 7)) == expected(range(1, 7))


def damage(path) -> None:
    """Flips bits of every block."""
    with path.open("r+b") as segment:
        for offset in range(0, path.stat().st_size, 2000):
            segment.seek(offset)
            byte = segment.read(1)
            segment.seek(offset)
            segment.write(bytes([byte[0] ^ 1]))


async def test_the_mesh_follows_what_the_store_holds(start_kvstore, join, connect, mesh_settings):
    batches: list[events_pb2.KvEventBatch] = []
    bus = await Bus.connect(mesh_settings, "test", Metrics("router", "test"))
    await bus.subscribe(
        kv_subject(mesh_settings.mesh), lambda _, payload: batches.append(events_pb2.KvEventBatch.FromString(payload))
    )
    kvstore = start_kvstore(capacity_bytes=4 << 20, segment_bytes=1 << 20)
    endpoint = kvstore.start()
    worker = await join(kvstore, endpoint)
    record = worker.record
    assert (record.role, record.capacity_bytes) == (membership_pb2.ROLE_KVSTORE, 4 << 20)
    assert "tidemill.mesh.v1.WorkerService/GetSnapshot" in record.rpcs
    present: set[bytes] = set()
    seen = 0

    def follow() -> int:
        nonlocal seen
        for batch in batches[seen:]:
            assert batch.domain.instance == kvstore.instance
            assert batch.domain.incarnation == batch.domain.epoch == record.incarnation
            for event in batch.events:
                if event.HasField("stored"):
                    assert event.stored.tier == common_pb2.TIER_L3
                    assert event.stored.kv_format_id == format_id(FORMAT)
                    present.update(split_hashes(event.stored.block_hashes))
                else:
                    present.difference_update(split_hashes(event.removed.block_hashes))
        seen = len(batches)
        return batches[-1].sequence if batches else 0

    for i in range(1, 30):
        await worker.put([header_of(i, 300_000)])
    stub = connect(endpoint)[1]
    snapshot = [message async for message in stub.GetSnapshot(worker_pb2.GetSnapshotRequest())]
    assert snapshot[-1].last
    assert {run.kv_format_id for message in snapshot for run in message.blocks} == {format_id(FORMAT)}
    held = {h for message in snapshot for run in message.blocks for h in split_hashes(run.block_hashes)}
    await until(lambda: follow() >= snapshot[-1].sequence and batches[-1].heartbeat)
    assert [batch.sequence for batch in batches if not batch.heartbeat] == list(range(1, snapshot[-1].sequence + 1))
    assert present == held
    assert 0 < len(held) < 29
    status = await worker.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
    assert status.blocks == len(held)
    assert status.used_bytes <= 4 << 20
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await bus.close()


async def test_a_drained_store_leaves_the_mesh_and_ends_well(start_kvstore, join, mesh_settings):
    kvstore = start_kvstore()
    worker = await join(kvstore, kvstore.start())
    await worker.put([header_of(1)])
    assert kvstore.end(signal.SIGTERM) == 0
    view = InstanceView(mesh_settings)
    await view.start()
    await until(lambda: view.connected)
    assert kvstore.instance not in view.records
    await view.close()
    assert "Traceback" not in kvstore.log


@pytest.mark.full
async def test_blocks_in_an_object_store_outlive_the_process_and_its_disk(start_kvstore, join, s3_server, make_bucket):
    await asyncio.to_thread(make_bucket, "outlives")
    chosen = {
        "object_url": "s3://outlives/kv",
        "object_endpoint": s3_server,
        "object_access_key": "kvstore",
        "object_secret_key": "secret",
        "data_dir": "/nowhere",
    }
    first = start_kvstore(**chosen)
    worker = await join(first, await asyncio.to_thread(first.start))
    answer = await worker.put([header_of(1), header_of(2)])
    assert list(answer.stored) == [True, True]
    first.end(signal.SIGKILL)
    again = start_kvstore(**chosen)
    worker = await join(again, await asyncio.to_thread(again.start))
    assert await worker.get([1, 2, 3]) == expected([1, 2])
    assert await worker.idle()
    status = await worker.stub.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest())
    assert status.blocks == 2
    assert dict(status.tenant_bytes) == {"": 10_000}
    assert again.end(signal.SIGTERM) == 0
    assert "secret" not in again.log.replace("cache_secret", "").replace("object_secret_key", "")


def test_help_names_every_setting():
    shown = subprocess.run(
        [sys.executable, "-m", "tidemill_kvstore", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in ("--data-dir", "--capacity-bytes", "--segment-bytes", "--fsync", "--transport", "--inflight-bytes"):
        assert flag in shown
