"""KV events from the bus into the index: the callback only queues, batches are applied in slices between other work."""

import asyncio
import time
from collections import deque

import structlog
from google.protobuf.message import DecodeError

from tidemill.mesh.v1.events_pb2 import KvEventBatch
from tidemill_kvcache.tracker import EventTracker

MAX_QUEUED_MESSAGES = 65536
MAX_QUEUED_BYTES = 64 * 1024 * 1024
SLICE_S = 0.005

log = structlog.get_logger()


class KvFeed:
    """Queue and task between the bus and the tracker. What does not fit is dropped, oldest first: a gap that heals."""

    def __init__(self, tracker: EventTracker) -> None:
        self.dropped = 0
        self.unreadable = 0
        self._tracker = tracker
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()

    @property
    def queued(self) -> int:
        """Messages that wait."""
        return len(self._queue)

    def on_message(self, _subject: str, payload: bytes) -> None:
        """Bus callback."""
        self._queue.append(payload)
        self._queued_bytes += len(payload)
        while len(self._queue) > MAX_QUEUED_MESSAGES or self._queued_bytes > MAX_QUEUED_BYTES:
            self._take()
            self.dropped += 1
        self._wake.set()

    async def run(self) -> None:
        """Applies until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                self._apply_slice()
                await asyncio.sleep(0)

    def _apply_slice(self) -> None:
        end = time.perf_counter() + SLICE_S
        while self._queue and time.perf_counter() < end:
            self._apply(self._take())

    def _apply(self, payload: bytes) -> None:
        try:
            self._tracker.receive(KvEventBatch.FromString(payload))
        except (DecodeError, ValueError) as error:
            # The domain's next batch shows a gap, which a snapshot heals.
            self.unreadable += 1
            log.warning("KV events cannot be read", error=str(error), bytes=len(payload))

    def _take(self) -> bytes:
        payload = self._queue.popleft()
        self._queued_bytes -= len(payload)
        return payload
