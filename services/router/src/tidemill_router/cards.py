"""ModelCards by digest, fetched from any worker that serves the model."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.message import DecodeError

from tidemill.mesh.v1.membership_pb2 import MembershipRecord, ModelCard
from tidemill.mesh.v1.worker_pb2 import GetAssetRequest
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceStub
from tidemill_mesh.channels import Channels
from tidemill_mesh.log import RateLimit
from tidemill_router.candidate import ModelFacts

if TYPE_CHECKING:
    from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceAsyncStub

POLL_S = 0.2
TIMEOUT_S = 3.0
LOG_INTERVAL_S = 10.0

log = structlog.get_logger()


class Cards:
    """What is known of each model revision; a revision's facts never change."""

    def __init__(
        self, workers: Callable[[], Iterable[MembershipRecord]], channels: Channels, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._channels = channels
        self._facts: dict[str, ModelFacts] = {}
        self._failure_log = RateLimit(LOG_INTERVAL_S, clock)

    def facts(self, revision: str) -> ModelFacts | None:
        """Facts of a revision; None until its card has been fetched."""
        return self._facts.get(revision)

    async def run(self) -> None:
        """Fetches missing cards until cancelled."""
        while True:
            for record in list(self._workers()):
                for model in record.models:
                    if model.card_digest and model.revision not in self._facts:
                        await self._fetch(record, model.revision, model.card_digest)
            await asyncio.sleep(POLL_S)

    async def _fetch(self, record: MembershipRecord, revision: str, digest: str) -> None:
        stub: WorkerServiceAsyncStub = WorkerServiceStub(self._channels.get(record.endpoint))
        try:
            parts = [part.data async for part in stub.GetAsset(GetAssetRequest(digest=digest), timeout=TIMEOUT_S)]
            data = b"".join(parts)
            if hashlib.sha256(data).hexdigest() != digest.removeprefix("sha256:"):
                raise ValueError("the card has another digest than announced")
            card = ModelCard.FromString(data)
            if card.block_size < 1:
                raise ValueError("the card has no block size")
        except (grpc.aio.AioRpcError, DecodeError, ValueError) as error:
            if (suppressed := self._failure_log.passes()) is not None:
                log.warning("no model card yet", instance=record.instance, revision=revision, error=str(error),
                            more=suppressed)  # fmt: skip
            return
        interval = max((group.snapshot_interval_tokens for group in card.kv_groups), default=0)
        self._facts[revision] = ModelFacts(card.block_size, card.kv_bytes_per_token, interval // card.block_size)
        log.info("model known", name=card.name, revision=revision, block_size=card.block_size)
