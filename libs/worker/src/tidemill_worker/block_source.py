"""What an onboarding needs of a place that blocks can come from."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from tidemill_mesh.errors import MeshError
from tidemill_worker.landing import Landing
from tidemill_worker.source_plan import Offer

FAILURES = (grpc.aio.AioRpcError, MeshError, TimeoutError, ExceptionGroup)
"""What ends a fetch without being a fault of ours."""

MESSAGE_BYTES = 16 << 20
"""Aimed size of one message of blocks; at least one block."""


class BlockSource(Protocol):
    """L2, a store or a peer, for one onboarding."""

    @property
    def offer(self) -> Offer:
        """What it has, and how quickly."""

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        """Brings wanted blocks to their places, reporting each that has landed; raises FAILURES. Returns or raises only
        once nothing writes there any more."""


def first_failure(error: BaseException) -> BaseException:
    """What a group of errors began with."""
    return first_failure(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
