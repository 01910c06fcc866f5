"""A lease kept alive by a thread of its own, so that a blocked event loop does not cost the process its membership."""

import asyncio
import threading
import time
from collections.abc import Callable

import structlog

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.log import RateLimit
from tidemill_mesh.membership.etcd import EtcdError, LeaseClient

# Local clocks may run at slightly different speeds: the holder stops trusting its lease a little early.
SAFE_SHARE = 0.9
RETRY_S = 0.5
LOG_INTERVAL_S = 10.0

log = structlog.get_logger()


class LeaseKeeper:
    """Holds a lease for the life of the process; after a loss it takes a new one and says so on the event loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        ttl_s: float,
        on_granted: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._ttl_s = max(2, round(ttl_s))
        self._on_granted = on_granted
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._wake = threading.Event()
        self._stopping = False
        # (lease id, monotonic time until which it is safe to act as its holder), replaced as one value.
        self._state: tuple[int, float] = (0, 0.0)
        self._error_log = RateLimit(LOG_INTERVAL_S, time.monotonic)

    @property
    def lease(self) -> int:
        """Id of the lease; 0: none."""
        return self._state[0]

    def holds(self, lease: int) -> bool:
        """Whether this lease is ours and, by this machine's clock, cannot have expired yet."""
        current, valid_until = self._state
        return lease != 0 and lease == current and time.monotonic() < valid_until

    def start(self) -> None:
        """Starts the thread; callbacks run on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_now(self) -> None:
        """Renews at once: somebody has reason to believe that the lease is gone."""
        self._wake.set()

    async def stop(self) -> None:
        """Revokes the lease, if etcd answers, and ends the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        client = LeaseClient(self._settings)
        try:
            while not self._stopping:
                try:
                    delay_s = self._renew(client)
                except Exception:
                    # Whatever it was: a thread that ended here would take the process out of the mesh for good.
                    log.exception("lease could not be renewed")
                    delay_s = RETRY_S
                self._wake.wait(delay_s)
                self._wake.clear()
            self._revoke(client)
        finally:
            client.close()

    def _renew(self, client: LeaseClient) -> float:
        """One grant or renewal; seconds until the next."""
        timeout_s = min(self._settings.liveness_s, self._ttl_s / 3)
        lease, _ = self._state
        sent = time.monotonic()
        try:
            if not lease:
                lease = client.grant(self._ttl_s, timeout_s)
                self._state = (lease, sent + self._ttl_s * SAFE_SHARE)
                self._post(self._on_granted, lease)
                return self._ttl_s / 3
            left_s = client.keep_alive(lease, timeout_s)
        except EtcdError as error:
            if (suppressed := self._error_log.passes()) is not None:
                log.warning("etcd does not renew the lease", error=str(error), more=suppressed)
            client.next_endpoint()
            return RETRY_S
        if left_s <= 0:
            self._state = (0, 0.0)
            log.warning("lease lost", lease=lease)
            self._post(self._on_lost)
            return 0.0
        self._state = (lease, sent + left_s * SAFE_SHARE)
        return self._ttl_s / 3

    def _revoke(self, client: LeaseClient) -> None:
        lease, _ = self._state
        self._state = (0, 0.0)
        if lease:
            try:
                client.revoke(lease, timeout_s=1.0)
            except EtcdError as error:
                log.info("lease left to expire", error=str(error))

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the keeper was not started"
        if not self._stopping:
            self._loop.call_soon_threadsafe(callback, *arguments)
