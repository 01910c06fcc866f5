"""One leader among several processes: a key under a lease, and a fence that the holder checks before each act."""

import asyncio
import time

import structlog

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.log import RateLimit
from tidemill_mesh.membership.etcd import EtcdClient, EtcdError
from tidemill_mesh.membership.lease import LeaseKeeper
from tidemill_mesh.tasks import end, spawn, wait_up_to

LOG_INTERVAL_S = 10.0

log = structlog.get_logger()


class Election:
    """Campaigns for a key as long as it is started; leadership ends with the lease, by the local clock too."""

    def __init__(self, settings: ServiceSettings, key: str, ttl_s: float, holder: str) -> None:
        self.fencing_token = 0
        self.leader = ""
        self._settings = settings
        self._key = key
        self._ttl_s = ttl_s
        self._holder = holder
        self._held_lease = 0
        self._wake = asyncio.Event()
        self._keeper = LeaseKeeper(settings, ttl_s, self._on_lease, self._on_lost)
        self._error_log = RateLimit(LOG_INTERVAL_S, time.monotonic)
        self._client: EtcdClient | None = None
        self._task: asyncio.Task[None] | None = None

    def is_leader(self) -> bool:
        """Whether this process leads now; ask before each act, never remember the answer."""
        return self._keeper.holds(self._held_lease)

    async def start(self) -> None:
        """Starts the campaign; does not wait for etcd."""
        self._client = EtcdClient(self._settings)
        self._keeper.start()
        self._task = spawn(self._campaign(self._client), "election")

    async def close(self) -> None:
        """Steps down; another one can lead at once if etcd answers."""
        await end(self._task)
        await self._keeper.stop()
        if self._client is not None:
            await self._client.close()

    async def _campaign(self, client: EtcdClient) -> None:
        while True:
            self._wake.clear()
            try:
                await self._stand(client)
            except EtcdError as error:
                if (suppressed := self._error_log.passes()) is not None:
                    log.warning("election waits for etcd", key=self._key, error=str(error), more=suppressed)
                await client.next_endpoint()
            except Exception:
                log.exception("campaign failed", key=self._key)
            await wait_up_to(self._wake, self._ttl_s / 3)

    async def _stand(self, client: EtcdClient) -> None:
        lease = self._keeper.lease
        if not lease:
            return
        held = await client.create(self._key, self._holder.encode(), lease)
        self.leader = held.value.decode("utf-8", "replace")
        won = held.lease == lease
        if won and self._held_lease != lease:
            log.info("leads", key=self._key, fencing_token=held.create_revision)
        if not won and self._held_lease:
            log.warning("leads no more", key=self._key, leader=self.leader)
        self._held_lease = lease if won else 0
        self.fencing_token = held.create_revision if won else 0

    def _on_lease(self, _lease: int) -> None:
        self._wake.set()

    def _on_lost(self) -> None:
        self._held_lease = 0
        self.fencing_token = 0
        self._wake.set()
