"""The segment store against a dictionary, with crashes, damage and files that vanish."""

import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill_kvcache.kv_format import format_id
from tidemill_kvcache.runs import RemovedRun, StoredRun
from tidemill_kvstore.index import key_of
from tidemill_kvstore.quotas import Quotas, parse_quotas
from tidemill_kvstore.record import BadRecord, decode_header, encode_header
from tidemill_kvstore.segment import segment_ids, segment_path
from tidemill_kvstore.store import SegmentStore, StoreLocked
from tidemill_transfer.checksum import checksum64

KIB = 1024


HELPERS = Path(__file__).with_name("kvstore_blocks.py")
make = runpy.run_path(str(HELPERS))["make"]
get = runpy.run_path(str(HELPERS))["get"]


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def open_(capacity: int = 64 * KIB, segment: int = 8 * KIB, fsync="none", folder: Path = tmp_path / "store"):
        store = SegmentStore(folder, capacity, segment, fsync)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.mark.parametrize("fsync", ["none", "segment", "put"])
def test_blocks_are_read_back_also_after_a_restart(open_store, fsync):
    store = open_store(fsync=fsync)
    assert store.put([make(i) for i in range(20)]) == [True] * 20
    store.close()
    again = open_store(fsync=fsync)
    assert all(get(again, i) == make(i)[1].tobytes() for i in range(20))
    assert again.counters["bad_records"] == 0


def test_a_second_pass_after_a_restart_does_not_grow_the_disk(open_store):
    store = open_store()
    store.put([make(i) for i in range(10)])
    used = store.used_bytes
    store.close()
    again = open_store()
    assert again.put([make(i) for i in range(10)]) == [True] * 10
    assert again.used_bytes == used


def test_formats_and_shards_of_a_hash_are_apart(open_store):
    store = open_store()
    store.put([make(1, shard="0-2"), make(1, 500, shard="2-4")])
    assert len(get(store, 1, "0-2")) == 1000
    assert len(get(store, 1, "2-4")) == 500
    assert get(store, 1, "all") is None


def test_a_store_names_the_shards_that_it_has_as_long_as_it_has_them(tmp_path):
    def opened():
        return SegmentStore(tmp_path / "store", 32 * KIB, 8 * KIB, quotas=Quotas(by_tenant={"t": 4000}))

    store = opened()
    store.put([make(1, tenant="t"), make(1, shard="0-2", tenant="t"), make(2, shard="0-2", tenant="t")])
    assert (store.shards("v1/b16/kv"), store.shards("v1/b32/kv")) == (["0-2", "all"], [])
    store.put([make(3 + i, shard="2-4", tenant="t") for i in range(6)])
    assert store.shards("v1/b16/kv") == ["2-4"]
    store.close()
    store = opened()
    assert store.shards("v1/b16/kv") == ["2-4"]
    store.close()


def test_a_block_with_its_snapshot_replaces_one_without_and_never_the_reverse(open_store):
    store = open_store()
    store.put([make(1), make(1, 2000, snapshot=True), make(1)])
    assert get(store, 1) == make(1, 2000, snapshot=True)[1].tobytes()
    store.close()
    assert get(open_store(), 1) == make(1, 2000, snapshot=True)[1].tobytes()


def test_a_leading_run_ends_at_the_first_gap_and_within_the_given_bytes(open_store):
    store = open_store()
    store.put([make(i) for i in (1, 2, 3, 5)])
    hashes = [i.to_bytes(16, "big") for i in range(1, 6)]
    assert len(store.find("v1/b16/kv", "all", hashes, 1 << 30)) == 3
    assert len(store.find("v1/b16/kv", "all", hashes, 2999)) == 2


def test_capacity_is_kept_and_what_was_read_outlives_what_was_not(open_store):
    store = open_store()
    for i in range(300):
        store.put([make(i)])
        assert store.used_bytes <= 64 * KIB
        assert get(store, 0) is not None
    assert get(store, 299) is not None
    assert get(store, 1) is None
    assert store.counters["evicted_blocks"] > 200
    assert store.counters["kept_blocks"] > 0
    on_disk = sum(path.stat().st_size for path in Path(store._folder).glob("*.segment"))
    assert on_disk == store.used_bytes


def test_eviction_goes_on_when_everything_was_read(open_store):
    store = open_store()
    for i in range(200):
        store.put([make(i)])
        get(store, i)
    assert store.used_bytes <= 64 * KIB
    assert get(store, 199) is not None


def test_a_smaller_capacity_after_a_restart_is_kept_at_once(open_store):
    store = open_store()
    store.put([make(i) for i in range(50)])
    store.close()
    assert open_store(capacity=20 * KIB).used_bytes <= 20 * KIB


def test_every_coming_and_going_is_announced_once_in_order(open_store):
    store = open_store()
    present: set[bytes] = set()

    def follow():
        for event in store.take_events():
            for block_hash in event.hashes:
                assert isinstance(event, StoredRun) != (block_hash in present)
                present.symmetric_difference_update([block_hash])

    for i in range(200):
        store.put([make(i, parent=(i - 1).to_bytes(16, "big") if i else b""), make(i, shard="0-2")])
        if i % 3 == 0:
            get(store, i)
        follow()
    assert present == {i.to_bytes(16, "big") for i in range(200) if get(store, i)}
    assert len(present) < 200


def test_a_run_of_one_put_is_announced_as_a_run(open_store):
    store = open_store()
    store.put([make(i, parent=(i - 1).to_bytes(16, "big") if i else b"") for i in range(5)])
    (run,) = store.take_events()
    assert isinstance(run, StoredRun)
    assert (run.parent, run.kv_format_id) == (b"", format_id("v1/b16/kv"))
    assert len(run.hashes) == 5


def test_blocks_found_at_start_are_announced(open_store):
    store = open_store()
    store.put([make(i) for i in range(3)])
    store.close()
    again = open_store()
    assert sorted(h for run in again.take_events() for h in run.hashes) == [i.to_bytes(16, "big") for i in range(3)]


def test_a_file_that_vanishes_is_a_miss_that_is_taken_back(open_store):
    store = open_store()
    store.put([make(i) for i in range(30)])
    store.take_events()
    for path in Path(store._folder).glob("*.segment"):
        path.unlink()
    assert get(store, 0) is None
    assert store.counters["missing_segments"] == 1
    removed = store.take_events()
    assert all(isinstance(event, RemovedRun) for event in removed)
    assert store.put([make(i) for i in range(30)]) == [True] * 30
    assert [i for i in range(30) if get(store, i) == make(i)[1].tobytes()]
    store.put([make(i) for i in range(30)])
    assert all(get(store, i) == make(i)[1].tobytes() for i in range(29, 22, -1))


def test_a_damaged_block_is_a_miss_that_is_taken_back_and_may_be_stored_again(open_store):
    store = open_store()
    store.put([make(1), make(2)])
    path = segment_path(store._folder, segment_ids(store._folder)[0])
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"damage")
    store.take_events()
    assert get(store, 1) is None
    assert get(store, 2) == make(2)[1].tobytes()
    assert store.counters["damaged_blocks"] == 1
    assert store.take_events() == [RemovedRun([make(1)[0].block_hash], format_id("v1/b16/kv"))]
    assert store.put([make(1)]) == [True]
    assert get(store, 1) == make(1)[1].tobytes()


def test_a_record_that_lies_where_another_is_expected_is_not_served(open_store):
    store = open_store()
    store.put([make(1), make(2)])
    path = segment_path(store._folder, segment_ids(store._folder)[0])
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[half:] + content[:half])
    assert get(store, 1) is None
    assert get(store, 2) is None


def test_a_folder_serves_one_process(open_store):
    open_store()
    with pytest.raises(StoreLocked):
        open_store()


def test_a_disk_that_refuses_leaves_earlier_blocks_whole(tmp_path):
    script = f"""
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from kvstore_blocks import get, make
        from tidemill_kvstore.store import SegmentStore
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        store = SegmentStore(Path({str(tmp_path)!r}), 1 << 20, 1 << 18)
        assert store.put([make(i) for i in range(8)]) == [True] * 4 + [False] * 4
        assert store.put([make(100)]) == [False]
        assert store.counters["disk_errors"] == 2
        assert store.put([make(101, 100)]) == [True]
        assert all(get(store, i) == make(i)[1].tobytes() for i in range(4))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    store = SegmentStore(tmp_path, 1 << 20, 1 << 18)
    assert all(get(store, i) == make(i)[1].tobytes() for i in range(4))
    assert store.counters["bad_records"] == 0
    store.close()


def test_the_half_of_a_record_that_a_killed_process_left_is_taken_off_the_disk(open_store):
    store = open_store()
    store.put([make(1), make(2)])
    store.close()
    path = segment_path(store._folder, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 3])
    store = open_store()
    assert path.stat().st_size == len(whole)
    assert store.counters["truncated_bytes"] == len(whole) // 3
    assert store.put([make(3)]) == [True]
    assert all(get(store, number) == make(number)[1].tobytes() for number in (1, 2, 3))


def test_a_segment_that_cannot_be_opened_does_not_end_the_store(open_store):
    store = open_store()
    in_the_way = segment_path(store._folder, 2)
    in_the_way.mkdir()
    stored = store.put([make(i) for i in range(10)])
    assert stored.index(False) == sum(stored) > 0
    assert store.put([make(20)]) == [False]
    assert store.put([make(21, 100)]) == [True], "the segment has room for a small one"
    in_the_way.rmdir()
    assert store.put([make(i) for i in range(10)]) == [True] * 10
    assert all(get(store, i) == make(i)[1].tobytes() for i in range(10))
    assert store.counters["disk_errors"] == 2


def test_readers_and_a_writer_that_evicts_do_not_disturb_each_other(open_store):
    store = open_store()
    ended = threading.Event()
    wrong = []

    def read() -> None:
        chance = random.Random(threading.get_ident())
        while not ended.is_set():
            number = chance.randrange(120)
            got = get(store, number)
            if got is not None and got != make(number)[1].tobytes():
                wrong.append(number)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(400):
        store.put([make(i % 120)])
    ended.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert store.counters["damaged_blocks"] == 0
    assert store.counters["missing_segments"] == 0


def test_a_process_killed_while_it_writes_serves_no_wrong_byte_afterwards(tmp_path):
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from kvstore_blocks import make
        from tidemill_kvstore.store import SegmentStore
        store = SegmentStore(Path({str(tmp_path)!r}), 40 << 20, 4 << 20)
        print("ready", flush=True)
        number = int(sys.argv[1])
        while True:
            store.put([make(number, 300_000)])
            print(number, flush=True)
            number += 1
    """
    chance = random.Random(7)
    durable: list[int] = []
    for first in (0, 1000, 2000):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        lines = iter(writer.stdout.readline, "")
        assert next(lines) == "ready\n"
        for _ in range(chance.randrange(5, 40)):
            durable.append(int(next(lines)))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        durable += [int(line) for line in lines if line.endswith("\n")]
        writer.stdout.close()
        store = SegmentStore(tmp_path, 40 << 20, 4 << 20)
        found = {number: get(store, number) for number in durable}
        assert all(got in (None, make(number, 300_000)[1].tobytes()) for number, got in found.items())
        assert all(found[number] is not None for number in durable[-5:])
        assert store.counters["damaged_blocks"] == 0
        store.close()


blocks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000), st.booleans()), max_size=30)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(blocks, blocks, st.data())
def test_whatever_happens_to_the_files_a_block_is_exact_or_missing(tmp_path, before, after, data):
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    written: dict[tuple, set[bytes]] = {}

    def put_all(store, numbers):
        for number, size, snapshot in numbers:
            header, payload = make(number, size, snapshot=snapshot)
            assert store.put([(header, payload)]) == [True]
            written.setdefault(key_of(header), set()).add(payload.tobytes())

    store = SegmentStore(folder, 32 * KIB, 8 * KIB)
    put_all(store, before)
    store.close()
    for path in sorted(folder.glob("*.segment")):
        size = path.stat().st_size
        damage = data.draw(st.sampled_from(["none", "truncate", "flip", "unlink", "garbage"]))
        where = data.draw(st.integers(0, max(0, size - 1)))
        if damage == "truncate":
            os.truncate(path, where)
        elif damage == "flip" and size:
            content = bytearray(path.read_bytes())
            content[where] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        elif damage == "unlink":
            path.unlink()
        elif damage == "garbage":
            with path.open("ab") as file:
                file.write(data.draw(st.binary(max_size=100)) + b"TMKV")
    store = SegmentStore(folder, 32 * KIB, 8 * KIB)
    put_all(store, after)
    for number in range(31):
        got = get(store, number)
        key = ("v1/b16/kv", "all", number.to_bytes(16, "big"))
        assert got is None or got in written[key]
    assert store.used_bytes == sum(path.stat().st_size for path in folder.glob("*.segment")) <= 32 * KIB
    store.close()


@given(st.binary(max_size=200), st.integers(0, 1 << 40), st.booleans())
def test_a_header_is_read_back_or_refused(noise, position, snapshot):
    header = make(3, snapshot=snapshot, parent=b"p" * 16)[0]
    encoded = bytearray(encode_header(header))
    assert decode_header(bytes(encoded)) == header
    encoded[position % len(encoded)] ^= 1 + position % 255
    with pytest.raises(BadRecord):
        decode_header(bytes(encoded))
    with pytest.raises(BadRecord):
        decode_header(noise)


def test_a_header_with_a_name_that_is_no_text_is_a_bad_record():
    header = make(1)[0]
    body = encode_header(header)[:-8].replace(b"v1/b16/kv", b"\xff" * 9)
    with pytest.raises(BadRecord):
        decode_header(body + checksum64(body).to_bytes(8, "little"))


def test_a_tenant_beyond_its_quota_loses_its_own_oldest_blocks_only(tmp_path):
    quotas = Quotas(by_tenant={"greedy": 3000})
    store = SegmentStore(tmp_path / "store", 32 * KIB, 8 * KIB, quotas=quotas)
    store.put([make(number, tenant="modest") for number in range(5)])
    get(store, 1)
    for number in range(100, 160):
        store.put([make(number, tenant="greedy")])
        assert get(store, 100) is not None or number > 100
    assert store.tenant_bytes() == {"modest": 5000, "greedy": 3000}
    assert all(get(store, number) == make(number, tenant="modest")[1].tobytes() for number in range(5))
    assert get(store, 159) == make(159, tenant="greedy")[1].tobytes()
    assert store.counters["over_quota_blocks"] == 57
    assert store.counters["evicted_blocks"] == 0
    assert store.used_bytes <= 32 * KIB
    assert not store.fits(make(1, size=3001, tenant="greedy")[0])
    store.close()
    again = SegmentStore(tmp_path / "store", 32 * KIB, 8 * KIB, quotas=quotas)
    assert again.tenant_bytes() == {"modest": 5000, "greedy": 3000}, "what was dropped does not come back"
    assert get(again, 159) is not None
    again.close()


def test_records_of_the_first_version_are_still_read(open_store, tmp_path):
    store = open_store()
    old = replace(make(1)[0], version=1)
    store.put([(old, make(1)[1]), make(2, tenant="acme")])
    store.close()
    again = open_store()
    assert get(again, 1) == make(1)[1].tobytes()
    assert again.tenant_bytes() == {"": 1000, "acme": 1000}


def test_quotas_are_read_or_refused_by_name():
    assert parse_quotas(5, ["a=1", "b=c=2"]).by_tenant == {"a": 1, "b=c": 2}
    assert parse_quotas(5, ["a=1"]).of("z") == 5
    with pytest.raises(ValueError, match="'a:1' is not tenant=bytes"):
        parse_quotas(5, ["a:1"])
