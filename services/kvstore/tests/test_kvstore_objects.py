"""Blocks in an object store: against S3 servers on this machine."""

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from obstore.exceptions import BaseError
from obstore.store import MemoryStore

from tidemill_kvcache.runs import RemovedRun, StoredRun
from tidemill_kvstore.object_names import block_name, format_digest, parse_block_name
from tidemill_kvstore.object_store import ObjectBlockStore
from tidemill_kvstore.open_store import open_bucket, open_store
from tidemill_kvstore.quotas import Quotas
from tidemill_kvstore.record import RecordHeader
from tidemill_kvstore.settings import KvStoreSettings

HELPERS = Path(__file__).with_name("kvstore_blocks.py")
make = runpy.run_path(str(HELPERS))["make"]
get = runpy.run_path(str(HELPERS))["get"]

OpenStore = Callable[..., ObjectBlockStore]


@pytest.fixture
def settings(s3_server: str, make_bucket: Callable[[str], None], request: pytest.FixtureRequest) -> KvStoreSettings:
    """Of a kvstore whose blocks go to a bucket of the test's own."""
    bucket = "b-" + format_digest(request.node.name)
    make_bucket(bucket)
    return KvStoreSettings(
        object_url=f"s3://{bucket}/kv",
        object_endpoint=s3_server,
        object_access_key="kvstore",
        object_secret_key="secret",
        object_timeout_s=60.0,
    )


@pytest.fixture
def open_objects(settings: KvStoreSettings) -> Iterator[OpenStore]:
    opened: list[ObjectBlockStore] = []

    def open_(capacity: int = 1 << 20, quotas: Quotas | None = None) -> ObjectBlockStore:
        opened.append(ObjectBlockStore(open_bucket(settings), capacity, 1 << 16, quotas))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def test_the_settings_choose_the_object_store(settings: KvStoreSettings) -> None:
    store = open_store(settings)
    assert isinstance(store, ObjectBlockStore)
    assert store.put([make(1)]) == [True]
    assert get(store, 1) == make(1)[1].tobytes()
    store.close()


def test_blocks_are_found_by_another_kvstore_and_after_a_restart(open_objects: OpenStore) -> None:
    first, second = open_objects(), open_objects()
    parent = make(1)[0].block_hash
    assert first.put([make(1), make(2, parent=parent), make(3, snapshot=True)]) == [True] * 3
    assert get(second, 1) is None
    second.refresh()
    assert all(get(second, number) == make(number)[1].tobytes() for number in (1, 2))
    assert get(second, 3) == make(3, snapshot=True)[1].tobytes()
    restarted = open_objects()
    stored = [event for event in restarted.take_events() if isinstance(event, StoredRun)]
    assert {h for run in stored for h in run.hashes} == {make(i)[0].block_hash for i in (1, 2, 3)}
    assert restarted.used_bytes == 3000
    assert [entry is not None for entry in restarted.peek("v1/b16/kv", "all", [parent, b"x" * 16])] == [True, False]


def test_what_another_kvstore_has_deleted_is_taken_back_at_the_next_listing(open_objects: OpenStore) -> None:
    first, second = open_objects(), open_objects(capacity=2000)
    assert first.put([make(number) for number in range(3)]) == [True] * 3
    first.take_events()
    second.refresh()
    second.put([make(9)])
    left = {number for number in (0, 1, 2, 9) if get(second, number) is not None}
    assert (len(left), 9 in left) == (2, True)
    assert first.num_blocks == 3
    first.refresh()
    told = {type(event).__name__: set(event.hashes) for event in first.take_events()}
    assert told["RemovedRun"] == {make(number)[0].block_hash for number in {0, 1, 2} - left}
    assert told["StoredRun"] == {make(9)[0].block_hash}
    assert (first.num_blocks, first.used_bytes) == (2, 2000)


@pytest.mark.full
@pytest.mark.parametrize("s3_server", ["rclone"], indirect=True)
def test_a_listing_of_several_pages_is_read_to_its_end(open_objects: OpenStore) -> None:
    # Of at most 1,000 objects each.
    store = open_objects(capacity=1 << 24)
    for start in range(0, 2100, 100):
        assert store.put([make(number, 10) for number in range(start, start + 100)]) == [True] * 100
    other = open_objects(capacity=1 << 24)
    assert other.num_blocks == 2100
    assert get(other, 2099) == make(2099, 10)[1].tobytes()


@pytest.mark.parametrize("s3_server", ["rclone"], indirect=True)
def test_a_key_that_the_server_refuses_is_told_at_once(settings: KvStoreSettings) -> None:
    with pytest.raises(BaseError):
        open_store(replace(settings, object_secret_key="another"))


def test_a_batch_ends_before_an_object_that_somebody_deleted_or_damaged(
    open_objects: OpenStore, settings: KvStoreSettings
) -> None:
    store = open_objects()
    store.put([make(number) for number in range(4)])
    bucket = open_bucket(settings)
    name = block_name(make(2)[0])
    body = bytearray(bytes(bucket.get(name).bytes()))
    body[-1] ^= 1
    bucket.put(name, bytes(body))
    bucket.delete(block_name(make(3)[0]))
    entries = store.find("v1/b16/kv", "all", [make(number)[0].block_hash for number in range(4)], 1 << 20)
    out = np.empty(4000, np.uint8)
    assert store.read(entries, out) == 2
    assert out[:2000].tobytes() == make(0)[1].tobytes() + make(1)[1].tobytes()
    assert store.counters["damaged_blocks"] == store.counters["missing_segments"] == 1
    assert store.num_blocks == 2
    store.put([make(2)])
    assert get(store, 2) == make(2)[1].tobytes()


def test_capacity_and_quotas_are_kept_and_told(open_objects: OpenStore, settings: KvStoreSettings) -> None:
    store = open_objects(capacity=6000, quotas=Quotas(by_tenant={"small": 2000}))
    for number in range(8):
        store.put([make(number)])
        get(store, 0)
    present = {number for number in range(8) if get(store, number) is not None}
    assert present == {0, 3, 4, 5, 6, 7}, "the least recently used left"
    removed = [h for event in store.take_events() if isinstance(event, RemovedRun) for h in event.hashes]
    assert removed == [make(1)[0].block_hash, make(2)[0].block_hash]
    assert sum(len(page) for page in open_bucket(settings).list("blocks/")) == 6
    for number in range(10, 14):
        store.put([make(number, tenant="small")])
    assert store.tenant_bytes()["small"] == 2000
    assert get(store, 13) == make(13, tenant="small")[1].tobytes()


def test_a_store_that_cannot_be_reached_costs_hits_only(
    open_objects: OpenStore, settings: KvStoreSettings, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_objects()
    store.put([make(1)])
    gone = KvStoreSettings(
        object_url=settings.object_url,
        object_endpoint="http://127.0.0.1:1",
        object_access_key="kvstore",
        object_secret_key="secret",
        object_timeout_s=0.5,
    )
    store._bucket = open_bucket(gone)
    assert get(store, 1) is None
    assert "the object store does not give a block" in caplog.text
    assert store.put([make(2)]) == [False]
    assert store.counters["disk_errors"] == 2
    assert store.num_blocks == 1, "what could not be asked is not lost"


def test_a_deadline_ends_a_batch() -> None:
    store = ObjectBlockStore(MemoryStore(), 1 << 20, 1 << 16)
    store.put([make(1)])
    entries = store.find("v1/b16/kv", "all", [make(1)[0].block_hash], 1 << 20)
    assert store.read(entries, np.empty(1000, np.uint8), until_s=0.0) == 0
    store.close()


@pytest.mark.parametrize("body", [b"", b"TMKV", bytes(2000)])
def test_a_block_whose_header_is_damaged_is_dropped(body: bytes) -> None:
    bucket = MemoryStore()
    store = ObjectBlockStore(bucket, 1 << 20, 1 << 16)
    store.put([make(1)])
    bucket.put(block_name(make(1)[0]), body)
    assert get(store, 1) is None
    assert (store.num_blocks, store.counters["damaged_blocks"]) == (0, 1)
    assert not list(bucket.list("blocks/").collect())
    assert store.put([make(1)]) == [True]
    assert get(store, 1) == make(1)[1].tobytes()
    store.close()


@pytest.mark.parametrize("name", [b"", b"v1/b16/other", b"\xff\xfe"])
def test_a_damaged_name_of_a_format_hides_its_blocks_until_it_is_written_again(name: bytes) -> None:
    bucket = MemoryStore()
    first = ObjectBlockStore(bucket, 1 << 20, 1 << 16)
    first.put([make(1)])
    first.close()
    bucket.put(f"formats/{format_digest('v1/b16/kv')}", name)
    store = ObjectBlockStore(bucket, 1 << 20, 1 << 16)
    assert store.num_blocks == 0
    store.put([make(2)])
    store.refresh()
    assert all(get(store, number) == make(number)[1].tobytes() for number in (1, 2))
    store.close()


@pytest.mark.parametrize("snapshots", [[False, False], [True, True], [True, False], [False, True, False]])
def test_copies_of_a_block_in_one_put_leave_the_best_one(snapshots: list[bool]) -> None:
    bucket = MemoryStore()
    store = ObjectBlockStore(bucket, 1 << 20, 1 << 16)
    assert store.put([make(1, snapshot=snapshot) for snapshot in snapshots]) == [True] * len(snapshots)
    assert get(store, 1) == make(1, snapshot=any(snapshots))[1].tobytes()
    assert (store.num_blocks, store.used_bytes) == (1, 1000)
    assert len(bucket.list("blocks/").collect()) == 1
    store.close()


def test_a_block_that_is_listed_before_its_put_ends_is_kept() -> None:
    class ListedAtOnce(MemoryStore):
        def put(self, path: str, file: bytes) -> None:
            super().put(path, file)
            store.refresh()

    store = ObjectBlockStore(ListedAtOnce(), 1 << 20, 1 << 16)
    assert store.put([make(1)]) == [True]
    assert get(store, 1) == make(1)[1].tobytes()
    store.close()


@pytest.mark.parametrize("tenant", ["", "acme", "a/b.c=ü"])
def test_a_name_tells_its_header(tenant: str) -> None:
    header = RecordHeader(b"h" * 16, b"", "v1/b16/" + "x" * 900, "0-3", 10, 1 << 63, True, 16, tenant)
    name = block_name(header)
    assert len(name) < 300
    assert parse_block_name(name, {format_digest(header.kv_format): header.kv_format}) == header
    assert parse_block_name(name, {}) is None
    assert parse_block_name("blocks/none", {}) is None
