"""Transfers of one rank on the I/O thread's loop: between its KV pool, L2 and the transfer agent.

Each command is answered exactly once, by TransferDone or TransferFailed, and a receive is answered only when nothing
writes into the pool any more.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import structlog

from tidemill_engine.host_pool import HostPool
from tidemill_engine.messages import (
    EngineError,
    LoadHost,
    RecvKV,
    Report,
    SaveHost,
    SendKV,
    TransferDone,
    TransferFailed,
)
from tidemill_engine.transfer_pool import Bytes, DevicePool, Pool
from tidemill_transfer.agent import TransferAgent
from tidemill_transfer.checksum import checksum64
from tidemill_transfer.errors import TransferError

TransferCommand = SendKV | RecvKV | SaveHost | LoadHost

log = structlog.get_logger("tidemill.transfers")

T = TypeVar("T")

_CODES = {
    "peer_lost": "WORKER_LOST",
    "deadline": "DEADLINE_EXCEEDED",
    "checksum": "INTERNAL",
    "truncated": "INTERNAL",
    "unavailable": "UNAVAILABLE",
}


class RankTransfers:
    """Runs the transfers of one rank, each as a task with a deadline of at most `limit_s`."""

    def __init__(
        self,
        agent: TransferAgent,
        pool: Pool,
        limit_s: float,
        report: Callable[[Report], None],
        host: HostPool | None = None,
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._host = host
        self._limit_s = limit_s
        self._report = report
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing: set[int] = set()
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")
        self._device = pool if isinstance(pool, DevicePool) and agent.takes_device_memory else None

    def start(self, command: TransferCommand) -> None:
        """Begins a transfer."""
        if self._device is not None:
            self._device.bind_thread()
        if command.transfer_id in self._tasks:
            log.error("duplicate_transfer", transfer_id=command.transfer_id)
            return
        self._tasks[command.transfer_id] = asyncio.create_task(self._answer(command.transfer_id, self._work(command)))

    def _work(self, command: TransferCommand) -> Coroutine[Any, Any, Report]:
        match command:
            case SendKV():
                return self._send(command)
            case RecvKV():
                return self._receive(command)
            case SaveHost() | LoadHost():
                return self._copy(command)

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
        self._check_blocks(command.block_ids, command.from_host)

        device = self._device if _is_plain(command) else None

        def gather() -> tuple[Any, int]:
            # After the deadline the blocks may belong to another request.
            _seconds_left(ends_s)
            if device is not None:
                return device.gather_on_device(command.block_ids, piece.head_start, piece.head_end), 0
            if command.from_host:
                data = self._slots().read(command.block_ids, command.snapshot_ids)
            else:
                data = self._pool.gather(
                    command.block_ids,
                    piece.head_start,
                    piece.head_end,
                    command.sequence_slot,
                    command.snapshot_ids,
                    command.per_block_snapshots,
                )
            return data, checksum64(data)

        data, checksum = await self._run_copy(device, gather)
        if piece.size_bytes and data.nbytes != piece.size_bytes:
            raise ValueError(f"the piece has {data.nbytes} bytes, not {piece.size_bytes}")
        await self._agent.send(piece.peer_address, piece.tag, data, _seconds_left(ends_s))
        seconds = time.monotonic() - started_s
        return TransferDone(command.transfer_id, data.nbytes, seconds, checksum, len(command.block_ids))

    async def _copy(self, command: SaveHost | LoadHost) -> Report:
        """Between pool and L2."""
        started_s = time.monotonic()
        ends_s = started_s + min(command.deadline_s, self._limit_s)
        self._check_blocks(command.block_ids, False)
        self._check_blocks(command.slots, True)
        host = self._slots()

        def in_time() -> None:
            # After the deadline the blocks may belong to another request.
            _seconds_left(ends_s)

        def copy() -> tuple[int, int]:
            blocks, slots = command.block_ids, command.slots
            if isinstance(command, LoadHost):
                return host.load(slots, blocks, command.snapshot_slots, command.snapshot_ids, in_time)
            return len(slots), host.save(blocks, slots, command.snapshot_ids, command.snapshot_slots, in_time)

        # What has begun to write is not cancelled.
        self._writing.add(command.transfer_id)
        good, size_bytes = await asyncio.get_running_loop().run_in_executor(self._copier, copy)
        return TransferDone(command.transfer_id, size_bytes, time.monotonic() - started_s, good_blocks=good)

    async def _receive(self, command: RecvKV) -> Report:
        started_s = time.monotonic()
        ends_s = started_s + min(command.deadline_s, self._limit_s)
        piece = command.piece
        self._check_blocks(command.block_ids, command.to_host)
        sizes = self._part_sizes(command)
        if sum(sizes) != piece.size_bytes:
            raise ValueError(f"the piece should have {sum(sizes)} bytes, not {piece.size_bytes}")
        device = self._device if _is_plain(command) else None
        data = np.empty(piece.size_bytes, np.uint8) if device is None else device.empty_on_device(piece.size_bytes)
        await self._agent.recv(piece.peer_address, piece.tag, data, _seconds_left(ends_s))
        self._writing.add(command.transfer_id)

        def write() -> tuple[int, int]:
            # Other copies may have come first; after the deadline the blocks may belong to another request.
            _seconds_left(ends_s)
            if device is None:
                return self._verify_and_write(command, data, sizes)
            return self._write_on_device(command, data)

        good, checksum = await self._run_copy(device, write)
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
            intact, heads = data[:num_bytes], (piece.head_start, piece.head_end)
            if command.keep_heads is not None:
                has_snapshot = [i >= 0 for i in snapshot_ids] or [False] * good
                intact = self._pool.cut_heads(intact, heads, command.keep_heads, command.source_dtype, has_snapshot)
                heads = command.keep_heads
            if command.to_host:
                self._slots().write(intact, command.block_ids[:good], snapshot_ids, heads)
                return good, checksum
            self._pool.scatter(
                intact,
                command.block_ids[:good],
                *heads,
                command.source_dtype,
                command.sequence_slot,
                snapshot_ids,
                command.per_block_snapshots,
            )
        return good, checksum

    async def _run_copy(self, device: DevicePool | None, copy: Callable[[], T]) -> T:
        """On the copy thread; here where an idle device does it in less time than another thread takes to wake."""
        if device is not None and device.is_idle:
            return copy()
        return await asyncio.get_running_loop().run_in_executor(self._copier, copy)

    def _write_on_device(self, command: RecvKV, data: Any) -> tuple[int, int]:
        assert self._device is not None
        heads = command.piece.head_start, command.piece.head_end
        self._device.scatter_from_device(data, command.block_ids, *heads, command.source_dtype)
        return len(command.block_ids), 0

    def _check_blocks(self, block_ids: list[int], in_host: bool) -> None:
        num_blocks = self._slots().num_blocks if in_host else self._pool.num_blocks
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
            raise ValueError(f"a block id is outside the {'L2' if in_host else 'pool'} of {num_blocks} blocks")

    def _slots(self) -> HostPool:
        if self._host is None:
            raise ValueError("this rank has no L2")
        return self._host


def _is_plain(command: SendKV | RecvKV) -> bool:
    """Blocks alone, between ranks: no bytes of this process's memory, none whose checksum a store has kept."""
    if isinstance(command, SendKV):
        in_memory = command.from_host
    else:
        in_memory = command.to_host or bool(command.block_checksums or command.piece.checksum)
    return not (in_memory or command.sequence_slot >= 0 or command.per_block_snapshots or command.snapshot_ids)


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
        raise TransferError("deadline", "the transfer's time is over")
    return left_s
