"""Blocks of L1 that are kept while they are copied: asked of the domain's leader, and always given back."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tidemill_engine import messages
from tidemill_worker.domain import Domain

PIN_TIMEOUT_S = 5.0


class DomainPins:
    """The pins of one domain's epoch."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._epoch = domain.epoch
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[messages.BlocksPinned]] = {}

    @asynccontextmanager
    async def hold(self, hashes: Sequence[bytes]) -> AsyncIterator[messages.BlocksPinned]:
        """Keeps the leading blocks of these that are still cached; TimeoutError when the leader does not answer."""
        pin_id = next(self._ids)
        self._waiting[pin_id] = asyncio.get_running_loop().create_future()
        self._send(messages.PinBlocks(pin_id, list(hashes)))
        try:
            async with asyncio.timeout(PIN_TIMEOUT_S):
                pinned = await self._waiting[pin_id]
            yield pinned
        finally:
            del self._waiting[pin_id]
            self._send(messages.UnpinBlocks(pin_id))

    def pinned(self, report: messages.BlocksPinned) -> None:
        """The leader's answer."""
        future = self._waiting.get(report.pin_id)
        if future is not None and not future.done():
            future.set_result(report)

    def _send(self, command: messages.PinBlocks | messages.UnpinBlocks) -> None:
        """The next epoch counts its pins from one as well: it must not hear of these."""
        if self._domain.epoch == self._epoch:
            self._domain.send(command)
