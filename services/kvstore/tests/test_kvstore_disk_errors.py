"""What a disk that fails for a moment costs: no promise that is not kept, and no block that is whole."""

import errno
import runpy
from pathlib import Path

import pytest

from tidemill_kvstore import store as store_module
from tidemill_kvstore.segment import SegmentWriter
from tidemill_kvstore.store import SegmentStore

KIB = 1024
BLOCKS = runpy.run_path(str(Path(__file__).with_name("kvstore_blocks.py")))
get, make = BLOCKS["get"], BLOCKS["make"]


@pytest.mark.parametrize(("number", "kept"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EIO, False)])
def test_a_read_that_fails_for_want_of_something_else_leaves_the_block(tmp_path, monkeypatch, number, kept):
    store = SegmentStore(tmp_path, 32 * KIB, 8 * KIB)
    store.put([make(1)])

    def failing(*_):
        raise OSError(number, "as told")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "read_record", failing)
        assert get(store, 1) is None
    assert (get(store, 1) is not None) == kept
    assert store.counters["disk_errors"] == kept
    assert store.counters["damaged_blocks"] == (not kept)
    store.close()


@pytest.mark.parametrize(("fsync", "answer"), [("put", False), ("none", True)])
def test_a_block_that_could_not_be_synced_is_not_called_stored(tmp_path, monkeypatch, fsync, answer):
    store = SegmentStore(tmp_path, 32 * KIB, 8 * KIB, fsync)

    def failing(_):
        raise OSError(errno.EIO, "as told")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentWriter, "sync", failing)
        assert store.put([make(1), make(2)]) == [answer, answer]
    assert store.counters["disk_errors"] == (not answer)
    assert store.put([make(3)]) == [True]
    store.close()
