"""Transfers that this service asked its ranks for: each is awaited, has a deadline, and leaves no trace."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_worker.domain import Domain

# A rank answers at its deadline by itself; a little later it counts as unable to.
ANSWER_GRACE_S = 2.0
RATE_WEIGHT = 0.2
MIN_MEASURED_BYTES = 64 * 1024
UNDELIVERED = frozenset({errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, errors_pb2.ERROR_CODE_WORKER_LOST})
"""What a rank says of a transfer whose other end was silent, or was lost."""


class RankTransferError(MeshError):
    """A piece did not arrive, or could not be sent."""


class NotArrived(RankTransferError):
    """The other rank did not take or send the bytes in time, or its line broke; this one is well."""


@dataclass
class Pending:
    """A transfer that its rank has not answered yet."""

    domain: int
    answer: "asyncio.Future[messages.TransferDone]"


class RankTransfers:
    """Sends transfer commands to ranks and hands their answers back to who awaits them."""

    def __init__(self, planned_bytes_per_s: float, on_bytes: Callable[[str, int], None]) -> None:
        self.bytes_per_s = planned_bytes_per_s
        self.measured = False
        self._on_bytes = on_bytes
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    async def send_kv(self, domain: Domain, rank: int, command: messages.SendKV) -> messages.TransferDone:
        """Has a rank send a piece; `command.transfer_id` is set here. Raises RankTransferError."""
        done = await self._ask(domain, rank, command)
        self._measure(done)
        self._on_bytes("sent", done.size_bytes)
        return done

    async def recv_kv(self, domain: Domain, rank: int, command: messages.RecvKV) -> messages.TransferDone:
        """Has a rank receive a piece; returns or raises only once the rank no longer touches the blocks."""
        done = await self._ask(domain, rank, command)
        self._on_bytes("received", done.size_bytes)
        return done

    async def save_host(self, domain: Domain, rank: int, command: messages.SaveHost) -> messages.TransferDone:
        """Has a rank copy blocks to L2."""
        return await self._ask(domain, rank, command)

    async def load_host(self, domain: Domain, rank: int, command: messages.LoadHost) -> messages.TransferDone:
        """Has a rank copy blocks from L2; returns or raises only once the rank no longer touches the blocks."""
        return await self._ask(domain, rank, command)

    def answered(self, report: messages.TransferDone | messages.TransferFailed) -> None:
        """Takes a rank's answer."""
        pending = self._pending.pop(report.transfer_id, None)
        if pending is None or pending.answer.done():
            return
        if isinstance(report, messages.TransferDone):
            pending.answer.set_result(report)
        else:
            pending.answer.set_exception(_failure(report.error))

    def domain_down(self, domain: int) -> None:
        """The ranks are gone and with them what they were asked for."""
        for transfer_id in [i for i, pending in self._pending.items() if pending.domain == domain]:
            pending = self._pending.pop(transfer_id)
            if not pending.answer.done():
                pending.answer.set_exception(
                    RankTransferError(errors_pb2.ERROR_CODE_WORKER_LOST, "the rank that held the bytes is gone")
                )

    async def _ask(
        self,
        domain: Domain,
        rank: int,
        command: messages.SendKV | messages.RecvKV | messages.SaveHost | messages.LoadHost,
    ) -> messages.TransferDone:
        if not domain.up:
            raise RankTransferError(errors_pb2.ERROR_CODE_WORKER_LOST, "the rank that held the bytes is gone")
        command.transfer_id = next(self._ids)
        pending = Pending(domain.index, asyncio.get_running_loop().create_future())
        self._pending[command.transfer_id] = pending
        domain.send_rank(rank, command)
        give_up_at = time.monotonic() + command.deadline_s + ANSWER_GRACE_S
        try:
            async with asyncio.timeout(command.deadline_s + ANSWER_GRACE_S):
                return await asyncio.shield(pending.answer)
        except TimeoutError:
            domain.send_rank(rank, messages.CancelTransfer(command.transfer_id))
            raise RankTransferError(
                errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "a rank did not answer a transfer in time"
            ) from None
        except asyncio.CancelledError:
            domain.send_rank(rank, messages.CancelTransfer(command.transfer_id))
            await _settle(pending.answer, give_up_at)
            raise
        finally:
            self._pending.pop(command.transfer_id, None)

    def _measure(self, done: messages.TransferDone) -> None:
        if done.size_bytes < MIN_MEASURED_BYTES or done.seconds <= 0:
            return
        rate = done.size_bytes / done.seconds
        self.bytes_per_s = rate if not self.measured else self.bytes_per_s + RATE_WEIGHT * (rate - self.bytes_per_s)
        self.measured = True


async def _settle(answer: "asyncio.Future[messages.TransferDone]", give_up_at: float) -> None:
    """Waits for the rank's last word on a cancelled transfer, so that its blocks may be used again.

    Who waits may be cancelled once more, by a timeout around the first one or by a group that ends: the rank still
    writes then, so that only its answer or the end of its time ends the wait.
    """
    while not answer.done() and (left_s := give_up_at - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([answer], timeout=left_s)
    if answer.done():
        answer.exception()  # Else the loop would report a failure that nobody asked for any more.


def _failure(error: messages.EngineError) -> RankTransferError:
    codes = errors_pb2.ErrorCode
    name = f"ERROR_CODE_{error.code}"
    code = codes.Value(name) if name in codes.keys() else errors_pb2.ERROR_CODE_WORKER_LOST  # noqa: SIM118
    kind = NotArrived if code in UNDELIVERED else RankTransferError
    return kind(code, error.message, field=error.field, limit=error.limit)
