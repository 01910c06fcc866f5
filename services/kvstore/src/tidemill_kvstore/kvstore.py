"""What puts and gets share: memory, disk threads, and what the mesh is told."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import structlog

from tidemill.v1 import errors_pb2
from tidemill_kvstore.block_store import BlockStore, Bytes
from tidemill_kvstore.budget import BudgetFull, ByteBudget, Hold
from tidemill_kvstore.counts import Counts
from tidemill_kvstore.index import Entry
from tidemill_kvstore.presence import Presence
from tidemill_kvstore.requests import from_transfer_error
from tidemill_kvstore.settings import KvStoreSettings
from tidemill_mesh.errors import MeshError, code_name
from tidemill_transfer.agent import TransferAgent
from tidemill_transfer.errors import TransferError

RETRY_AFTER_S = 1.0

T = TypeVar("T")

log = structlog.get_logger()


class KvStore:
    """The store as its calls use it; lives on one event loop."""

    def __init__(
        self,
        settings: KvStoreSettings,
        store: BlockStore,
        agent: TransferAgent,
        presence: Presence,
        counts: Counts,
    ) -> None:
        self.settings = settings
        self.store = store
        self.agent = agent
        self.presence = presence
        self.counts = counts
        self.draining = False
        # Halves, and threads of their own: a disk that is slow to write holds up no read.
        self.put_budget = ByteBudget(settings.inflight_bytes // 2, settings.max_waiting)
        self.get_budget = ByteBudget(settings.inflight_bytes // 2, settings.max_waiting)
        self.max_message_bytes = min(settings.max_message_bytes, settings.inflight_bytes // 2)
        self.verifier: Executor = ThreadPoolExecutor(1, "kvstore-verify")
        self.writer: Executor = ThreadPoolExecutor(1, "kvstore-write")
        self._readers: Executor = ThreadPoolExecutor(settings.read_threads, "kvstore-read")
        self._reads = 0
        self._running = {"put": 0, "get": 0}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def holds(self) -> dict[str, int]:
        """What is held now; all 0 after load."""
        agent = self.agent.holds
        return {
            "puts": self._running["put"],
            "gets": self._running["get"],
            "transfers": len(self._background) + agent["sends"] + agent["receives"],
            "inflight_bytes": self.put_budget.used_bytes + self.get_budget.used_bytes,
            "waiting": self.put_budget.num_waiting + self.get_budget.num_waiting,
            "unclaimed_messages": agent["unclaimed_messages"],
        }

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Counts a call and turns what ends it into a MeshError."""
        self._running[name] += 1
        started, outcome = time.monotonic(), "ok"
        try:
            with _as_mesh_error():
                yield
        except MeshError as error:
            outcome = code_name(error.code).lower()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._running[name] -= 1
            self.counts.call(name, outcome, time.monotonic() - started)

    async def read(self, hold: Hold, deadline: float, entries: Sequence[Entry], out: Bytes) -> int:
        """Reads leading blocks until the deadline; BudgetFull when the disk is behind with too many reads already."""
        if self._reads >= self.settings.read_threads + self.settings.max_queued_reads:
            raise BudgetFull("too many reads wait for the disk")
        self._reads += 1
        work = self._submit(self._readers, self.store.read, entries, out, deadline)
        work.add_done_callback(self._read_done)
        return await self._finish(work, hold, deadline)

    async def check(self, entries: Sequence[Entry]) -> None:
        """Reads blocks to drop those that are damaged."""
        await self._submit(self._readers, self.store.check, entries)
        self.tell()

    def _read_done(self, work: "asyncio.Future[int]") -> None:
        self._reads -= 1

    async def in_thread(
        self, pool: Executor, hold: Hold, deadline: float, function: Callable[..., T], *arguments: object
    ) -> T:
        """Runs a disk access off the loop; TimeoutError at the deadline, while its memory stays held to its end."""
        return await self._finish(self._submit(pool, function, *arguments), hold, deadline)

    def _submit(self, pool: Executor, function: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        # With the call's context: what a thread logs is of its request too.
        work = asyncio.get_running_loop().run_in_executor(pool, copy_context().run, function, *arguments)
        work.add_done_callback(_log_failure)
        return work

    async def _finish(self, work: "asyncio.Future[T]", hold: Hold, deadline: float) -> T:
        hold.keep_until(work)
        await asyncio.wait([work], timeout=max(0.0, deadline - time.monotonic()))
        if not work.done():
            raise TimeoutError("the disk is too slow")
        return work.result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what goes on after a call was answered."""
        task = asyncio.create_task(work, name="kvstore-send")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_log_failure)

    def tell(self) -> None:
        """Lets the mesh know what came and went."""
        self.presence.tell(self.store.take_events())

    async def idle(self, timeout_s: float) -> bool:
        """Waits until nothing is held; False when the time is over first."""
        end = time.monotonic() + timeout_s
        # Holds end in threads and in the agent, which announce nothing.
        while any(self.holds.values()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return not any(self.holds.values())

    async def close(self) -> None:
        """Ends what is under way, then the threads and the store."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        await self.agent.close()
        for pool in (self._readers, self.verifier, self.writer):
            await asyncio.to_thread(pool.shutdown)
        await asyncio.to_thread(self.store.close)


@contextmanager
def _as_mesh_error() -> Iterator[None]:
    try:
        yield
    except TransferError as error:
        raise from_transfer_error(error) from error
    except TimeoutError as error:
        raise MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, f"not done in time: {error}") from error
    except BudgetFull as error:
        raise MeshError(
            errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
            str(error) or "too many calls wait for memory",
            retry_after_s=RETRY_AFTER_S,
        ) from error


def _log_failure(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("kvstore work failed", exc_info=error)
