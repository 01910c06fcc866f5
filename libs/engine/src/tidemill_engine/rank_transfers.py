"""SendKV and RecvKV of one rank: between its KV pool and the transfer agent, on the I/O thread's loop.

Each command is answered exactly once, by TransferDone or TransferFailed, and a receive is answered only when nothing
writes into the pool any more.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from tidemill_engine.messages import EngineError, RecvKV, Report, SendKV, TransferDone, TransferFailed
from tidemill_transfer.agent import TransferAgent
from tidemill_transfer.checksum import checksum64
from tidemill_transfer.errors import TransferError

Bytes = npt.NDArray[np.uint8]

log = structlog.get_logger("tidemill.transfers")

_CODES = {
    "peer_lost": "WORKER_LOST",
    "deadline": "DEADLINE_EXCEEDED",
    "checksum": "INTERNAL",
    "truncated": "INTERNAL",
    "unavailable": "UNAVAILABLE",
}


class Pool(Protocol):
    """What transfers need of the KV pool; thread-safe for disjoint blocks."""

    num_blocks: int

    def gather(
        self,
        block_ids: list[int],
        head_start: int,
        head_end: int,
        sequence_slot: int = -1,
        snapshot_ids: list[int] = ...,
        per_block_snapshots: bool = False,
    ) -> Bytes: ...

    def scatter(
        self,
        data: Bytes,
        block_ids: list[int],
        head_start: int,
        head_end: int,
        source_dtype: str,
        sequence_slot: int = -1,
        snapshot_ids: list[int] = ...,
        per_block_snapshots: bool = False,
    ) -> None: ...

    def canonical_bytes(
        self,
        num_blocks: int,
        head_start: int,
        head_end: int,
        dtype: str,
        with_sequence: bool,
        num_snapshots: int = 0,
    ) -> int: ...


class RankTransfers:
    """Runs the transfers of one rank, each as a task with a deadline of at most `limit_s`."""

    def __init__(self, agent: TransferAgent, pool: Pool, limit_s: float, report: Callable[[Report], None]) -> None:
        self._agent = agent
        self._pool = pool
        self._limit_s = limit_s
        self._report = report
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing: set[int] = set()
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    def start(self, command: SendKV | RecvKV) -> None:
        """Begins a transfer."""
        if command.transfer_id in self._tasks:
            log.error("duplicate_transfer", transfer_id=command.transfer_id)
            return
        work = self._send(command) if isinstance(command, SendKV) else self._receive(command)
        self._tasks[command.transfer_id] = asyncio.create_task(self._answer(command.transfer_id, work))

    def cancel(self, transfer_id: int) -> None:
        """Ends a transfer, unless its bytes are on their way into the pool; unknown ids were answered before."""
        # Not at once: a task that is cancelled before its first step would never answer.
        asyncio.get_running_loop().call_soon(self._cancel_now, transfer_id)

    def _cancel_now(self, transfer_id: int) -> None:
        task = self._tasks.get(transfer_id)
        if task is not None and transfer_id not in self._writing:
            task.cancel()

    async def close(self) -> None:
        """Cancels everything and waits for it."""
        tasks = list(self._tasks.values())
        for transfer_id in list(self._tasks):
            self.cancel(transfer_id)
        await asyncio.gather(*tasks)
        self._copier.shutdown()

    async def _answer(self, transfer_id: int, work: Coroutine[Any, Any, Report]) -> None:
        try:
            self._report(await work)
        except asyncio.CancelledError:
            # Cancelled by CancelTransfer; the task has nothing else to do than to say so.
            self._report(TransferFailed(transfer_id, EngineError("CANCELLED", "the transfer was cancelled")))
        except TransferError as error:
            self._report(TransferFailed(transfer_id, EngineError(_CODES[error.code], str(error))))
        except ValueError as error:
            self._report(TransferFailed(transfer_id, EngineError("INVALID_ARGUMENT", str(error))))
        except Exception as error:
            log.exception("transfer_failed", transfer_id=transfer_id)
            message = f"{type(error).__name__}: {error}"
            self._report(TransferFailed(transfer_id, EngineError("INTERNAL", message)))
        finally:
            del self._tasks[transfer_id]
            self._writing.discard(transfer_id)

    async def _send(self, command: SendKV) -> Report:
        started_s = time.monotonic()
        ends_s = started_s + min(command.deadline_s, self._limit_s)
        piece = command.piece
        self._check_blocks(command.block_ids)

        def gather() -> tuple[Bytes, int]:
            # After the deadline the blocks may belong to another request.
            _seconds_left(ends_s)
            data = self._pool.gather(
                command.block_ids,
                piece.head_start,
                piece.head_end,
                command.sequence_slot,
                command.snapshot_ids,
                command.per_block_snapshots,
            )
            return data, checksum64(data)

        data, checksum = await asyncio.get_running_loop().run_in_executor(self._copier, gather)
        if piece.size_bytes and data.nbytes != piece.size_bytes:
            raise ValueError(f"the piece has {data.nbytes} bytes, not {piece.size_bytes}")
        await self._agent.send(piece.peer_address, piece.tag, data, _seconds_left(ends_s))
        seconds = time.monotonic() - started_s
        return TransferDone(command.transfer_id, data.nbytes, seconds, checksum, len(command.block_ids))

    async def _receive(self, command: RecvKV) -> Report:
        started_s = time.monotonic()
        ends_s = started_s + min(command.deadline_s, self._limit_s)
        piece = command.piece
        self._check_blocks(command.block_ids)
        sizes = self._part_sizes(command)
        if sum(sizes) != piece.size_bytes:
            raise ValueError(f"the piece should have {sum(sizes)} bytes, not {piece.size_bytes}")
        data = np.empty(piece.size_bytes, np.uint8)
        await self._agent.recv(piece.peer_address, piece.tag, data, _seconds_left(ends_s))
        _seconds_left(ends_s)
        self._writing.add(command.transfer_id)
        loop = asyncio.get_running_loop()
        good, checksum = await loop.run_in_executor(self._copier, self._verify_and_write, command, data, sizes)
        seconds = time.monotonic() - started_s
        return TransferDone(command.transfer_id, data.nbytes, seconds, checksum, good)

    def _part_sizes(self, command: RecvKV) -> list[int]:
        """Bytes of each block with its snapshot (kvstore objects), or of the whole piece."""
        start, end, dtype = command.piece.head_start, command.piece.head_end, command.source_dtype
        if not command.per_block_snapshots:
            with_sequence, snapshots = command.sequence_slot >= 0, len(command.snapshot_ids)
            if command.block_checksums and not (with_sequence or snapshots):
                return [self._pool.canonical_bytes(1, start, end, dtype, False)] * len(command.block_ids)
            count = len(command.block_ids)
            return [self._pool.canonical_bytes(count, start, end, dtype, with_sequence, snapshots)]
        ids = command.snapshot_ids or [-1] * len(command.block_ids)
        return [self._pool.canonical_bytes(1, start, end, dtype, False, int(i >= 0)) for i in ids]

    def _verify_and_write(self, command: RecvKV, data: Bytes, sizes: list[int]) -> tuple[int, int]:
        """Writes what is intact; returns its blocks and the checksum of all bytes."""
        piece, checksum = command.piece, checksum64(data)
        if piece.checksum not in (0, checksum):
            raise TransferError("checksum", f"transfer {command.transfer_id} arrived with other bytes than were sent")
        good, num_bytes = len(command.block_ids), data.nbytes
        if command.block_checksums:
            good, num_bytes = _leading_good(data, sizes, command.block_checksums)
        snapshot_ids = command.snapshot_ids[:good] if command.per_block_snapshots else command.snapshot_ids
        if good or not command.block_checksums:
            self._pool.scatter(
                data[:num_bytes],
                command.block_ids[:good],
                piece.head_start,
                piece.head_end,
                command.source_dtype,
                command.sequence_slot,
                snapshot_ids,
                command.per_block_snapshots,
            )
        return good, checksum

    def _check_blocks(self, block_ids: list[int]) -> None:
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self._pool.num_blocks):
            raise ValueError(f"a block id is outside the pool of {self._pool.num_blocks} blocks")


def _leading_good(data: Bytes, sizes: list[int], checksums: list[int]) -> tuple[int, int]:
    """Leading blocks whose checksum is right, and their bytes; the rest is dropped."""
    offset = 0
    for index, (size, expected) in enumerate(zip(sizes, checksums, strict=True)):
        if checksum64(data[offset : offset + size]) != expected:
            log.warning("block_checksum_mismatch", block=index)
            return index, offset
        offset += size
    return len(sizes), offset


def _seconds_left(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TransferError("deadline", "the transfer's time was over before it began")
    return left_s
