"""Put: bytes come in, are verified, go to disk, and only then can be read."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import structlog

from tidemill.mesh.v1 import kvstore_pb2
from tidemill.v1 import errors_pb2
from tidemill_kvstore.block_store import Bytes
from tidemill_kvstore.kvstore import RETRY_AFTER_S, KvStore
from tidemill_kvstore.record import RecordHeader
from tidemill_kvstore.requests import deadline_of, headers_of
from tidemill_mesh.errors import MeshError
from tidemill_transfer.checksum import checksum64
from tidemill_transfer.errors import TransferError

log = structlog.get_logger()


async def put(kvstore: KvStore, request: kvstore_pb2.PutRequest) -> kvstore_pb2.PutResponse:
    """Answers a Put."""
    with kvstore.call("put"):
        if kvstore.draining:
            raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "this kvstore is draining")
        deadline = time.monotonic() + deadline_of(request.deadline_s, kvstore.settings.max_deadline_s)
        headers = headers_of(request.blocks, request.tenant)
        _check_sizes(kvstore, headers)
        total = sum(header.size_bytes for header in headers)
        with await kvstore.put_budget.take(total, deadline - time.monotonic()) as hold:
            buffer = np.empty(total, np.uint8)
            await _receive(kvstore, request, headers, buffer, deadline)
            kvstore.counts.moved("received", total)
            verified = await kvstore.in_thread(kvstore.verifier, hold, deadline, verify, headers, buffer)
            good = [block for block in verified if block is not None]
            written = await kvstore.in_thread(kvstore.writer, hold, deadline, kvstore.store.put, good)
        kvstore.tell()
        results = iter(written)
        stored = [block is not None and next(results) for block in verified]
        log.debug("blocks put", blocks=len(headers), stored=sum(stored))
        return _answer(kvstore, stored, len(headers) - len(good))


def verify(headers: Sequence[RecordHeader], buffer: Bytes) -> list[tuple[RecordHeader, Bytes] | None]:
    """Blocks with their bytes; None where they are not those that were sent. A checksum of 0 is not known yet."""
    verified: list[tuple[RecordHeader, Bytes] | None] = []
    offset = 0
    for header in headers:
        payload = buffer[offset : offset + header.size_bytes]
        offset += header.size_bytes
        checksum = checksum64(payload)
        matches = header.checksum in (0, checksum)
        verified.append((replace(header, checksum=checksum), payload) if matches else None)
    return verified


def _check_sizes(kvstore: KvStore, headers: Sequence[RecordHeader]) -> None:
    limit = kvstore.max_message_bytes
    if sum(header.size_bytes for header in headers) > limit:
        raise MeshError(errors_pb2.ERROR_CODE_TOO_LARGE, "the put is too large", field="blocks", limit=f"{limit} bytes")
    for index, header in enumerate(headers):
        if not kvstore.store.fits(header):
            raise MeshError(
                errors_pb2.ERROR_CODE_TOO_LARGE,
                "a block is larger than this kvstore takes, or than its tenant may store",
                field=f"blocks[{index}].size_bytes",
                limit=f"{kvstore.store.max_block_bytes} bytes",
            )


async def _receive(
    kvstore: KvStore,
    request: kvstore_pb2.PutRequest,
    headers: Sequence[RecordHeader],
    buffer: Bytes,
    deadline: float,
) -> None:
    left_s = deadline - time.monotonic()
    if request.contiguous:
        await kvstore.agent.recv(request.source_address, request.first_tag, buffer, left_s)
        return
    offset = 0
    try:
        async with asyncio.TaskGroup() as group:
            for index, header in enumerate(headers):
                out = buffer[offset : offset + header.size_bytes]
                offset += header.size_bytes
                group.create_task(kvstore.agent.recv(request.source_address, request.first_tag + index, out, left_s))
    except* TransferError as errors:
        raise errors.exceptions[0] from None


def _answer(kvstore: KvStore, stored: list[bool], damaged: int) -> kvstore_pb2.PutResponse:
    kvstore.counts.blocks("stored", sum(stored))
    kvstore.counts.blocks("damaged_in_transfer", damaged)
    kvstore.counts.blocks("refused_by_disk", len(stored) - sum(stored) - damaged)
    error = None
    if damaged:
        log.error("blocks arrived with other bytes than were sent", blocks=damaged)
        error = MeshError(
            errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"{damaged} blocks differ from their checksums", field="blocks"
        )
    elif not all(stored):
        error = MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "the disk refuses more blocks", retry_after_s=RETRY_AFTER_S
        )
    return kvstore_pb2.PutResponse(stored=stored, error=error.to_detail() if error else None)
