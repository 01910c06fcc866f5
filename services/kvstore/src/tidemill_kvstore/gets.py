"""Get and Has: what is answered was read and verified before, so that the bytes promised are the bytes that come."""

import time
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_kvstore.block_store import Bytes
from tidemill_kvstore.budget import Hold
from tidemill_kvstore.index import Entry
from tidemill_kvstore.kvstore import KvStore
from tidemill_kvstore.requests import deadline_of, hashes_of, to_block_header
from tidemill_transfer.errors import TransferError

log = structlog.get_logger()


async def get(kvstore: KvStore, request: kvstore_pb2.GetRequest) -> kvstore_pb2.GetResponse:
    """Answers a Get; the bytes follow in the background, since the caller can post its receive only then."""
    with kvstore.call("get"):
        deadline = time.monotonic() + deadline_of(request.deadline_s, kvstore.settings.max_deadline_s)
        hashes = hashes_of(request.block_hashes)
        limit = min(request.max_bytes or kvstore.max_message_bytes, kvstore.max_message_bytes)
        entries = kvstore.store.find(request.kv_format, request.shard, hashes, limit)
        good = 0
        if entries:
            size = sum(entry.header.size_bytes for entry in entries)
            hold = await kvstore.get_budget.take(size, deadline - time.monotonic())
            good = await _read_and_send(kvstore, request, entries, hold, deadline)
            if good < len(entries):
                kvstore.tell()
                # A disk seldom damages one block alone: the others are looked at before anybody waits for them.
                kvstore.spawn(kvstore.check(entries[good + 1 :]))
        kvstore.counts.blocks("hit", good)
        kvstore.counts.blocks("missed", len(hashes) - good)
        log.debug("blocks read", asked=len(hashes), given=good)
        headers = [to_block_header(entry.header) for entry in entries[:good]]
        return kvstore_pb2.GetResponse(blocks=headers, size_bytes=sum(header.size_bytes for header in headers))


async def _read_and_send(
    kvstore: KvStore, request: kvstore_pb2.GetRequest, entries: Sequence[Entry], hold: Hold, deadline: float
) -> int:
    """Reads blocks and starts sending the good leading ones; returns how many."""
    sending = False
    try:
        buffer = np.empty(sum(entry.header.size_bytes for entry in entries), np.uint8)
        good = await kvstore.read(hold, deadline, entries, buffer)
        if good:
            size = sum(entry.header.size_bytes for entry in entries[:good])
            kvstore.spawn(_send(kvstore, request, buffer[:size], hold, deadline))
            sending = True
        return good
    finally:
        if not sending:
            hold.release()


async def _send(kvstore: KvStore, request: kvstore_pb2.GetRequest, data: Bytes, hold: Hold, deadline: float) -> None:
    try:
        await kvstore.agent.send(request.dest_address, request.tag, data, max(0.0, deadline - time.monotonic()))
    except TransferError as error:
        log.warning("blocks were not fetched", dest=request.dest_address, error=str(error))
        kvstore.counts.blocks("not_fetched", 1)
    else:
        kvstore.counts.moved("sent", data.nbytes)
    finally:
        hold.release()


def has(kvstore: KvStore, request: kvstore_pb2.HasRequest) -> kvstore_pb2.HasResponse:
    """Answers a Has from the index alone."""
    entries = kvstore.store.peek(request.kv_format, request.shard, hashes_of(request.block_hashes))
    leading = list(takewhile(lambda entry: entry is not None, entries))
    log.debug("blocks looked up", asked=len(entries), leading=len(leading))
    return kvstore_pb2.HasResponse(
        num_blocks=len(leading),
        snapshot_bitmap=_bitmap([entry is not None and entry.header.has_snapshot for entry in entries]),
        present_bitmap=_bitmap([entry is not None for entry in entries]),
        size_bytes=sum(entry.header.size_bytes for entry in leading if entry is not None),
        shards=kvstore.store.shards(request.kv_format),
    )


def _bitmap(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.array(flags, bool), bitorder="little").tobytes()
