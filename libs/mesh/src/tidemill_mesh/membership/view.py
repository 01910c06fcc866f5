"""A watched view of the mesh's instances: list, watch, resume; the last view stays while etcd is away."""

import asyncio
import time
from collections.abc import Callable

import structlog
from google.protobuf import json_format

from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.log import RateLimit
from tidemill_mesh.membership.etcd import Compacted, EtcdClient, EtcdError, Listing
from tidemill_mesh.membership.registration import instances_prefix
from tidemill_mesh.tasks import end, spawn, wait_up_to

RETRY_S = 0.5
LOG_INTERVAL_S = 10.0
AUDIT_LIVENESSES = 4
"""Of silence, after which a watch's knowledge is compared with etcd's keys."""

Record = membership_pb2.MembershipRecord
Observer = Callable[[Record | None, Record | None], None]

log = structlog.get_logger()


class Blind(Exception):
    """The watch has not told of what etcd holds."""


class InstanceView:
    """records: the latest known record of each instance; connected: whether etcd confirms them now."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.records: dict[str, Record] = {}
        self.connected = False
        self.synced = asyncio.Event()
        self._settings = settings
        self._prefix = instances_prefix(settings.mesh)
        self._by_key: dict[str, Record] = {}
        self._changed_at: dict[str, int] = {}
        self._observers: list[Observer] = []
        self._cluster = 0
        self._revision = 0
        self._confirmed = time.monotonic()
        self._error_log = RateLimit(LOG_INTERVAL_S, time.monotonic)
        self._client: EtcdClient | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since etcd last confirmed the view."""
        return time.monotonic() - self._confirmed

    async def start(self) -> None:
        """Starts watching; returns with the first view, or after a second without one."""
        self._client = EtcdClient(self._settings)
        self._task = spawn(self._follow_for_ever(self._client), "instances")
        if not await wait_up_to(self.synced, 1.0):
            log.warning("etcd is not reachable yet; going on without a view of the mesh", etcd=self._settings.etcd)

    async def close(self) -> None:
        """Stops watching; the last view stays readable."""
        await end(self._task)
        if self._client is not None:
            await self._client.close()
        self.connected = False

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Calls observer(old, new) for each change, first (None, record) for what is known; gives a way to stop."""
        self._observers.append(observer)
        for record in list(self.records.values()):
            self._tell(observer, None, record)
        return lambda: self._observers.remove(observer) if observer in self._observers else None

    async def _follow_for_ever(self, client: EtcdClient) -> None:
        while True:
            try:
                await self._resume_or_list(client)
                await self._watch(client)
            except Compacted as error:
                log.info("watch fell behind etcd's history: listing again", error=str(error))
                self._revision = 0
                continue
            except Blind as error:
                log.error("watch of the mesh is blind: listing again", error=str(error))
                self._revision = 0
                continue
            except EtcdError as error:
                if (suppressed := self._error_log.passes()) is not None:
                    log.warning("lost sight of etcd: keeping the last view", error=str(error), more=suppressed)
            except Exception:
                log.exception("following the mesh failed")
            self.connected = False
            await client.next_endpoint()
            await asyncio.sleep(RETRY_S)

    async def _resume_or_list(self, client: EtcdClient) -> None:
        """Lists unless the watch can go on: same cluster, and not set back to before what was seen."""
        if self._revision:
            head = await client.head(self._prefix)
            if head.cluster == self._cluster and head.revision >= self._revision:
                return
            log.warning("etcd has lost its history: listing again", revision=head.revision, seen=self._revision)
        self._replace(await client.list_keys(self._prefix))

    async def _watch(self, client: EtcdClient) -> None:
        batches = client.watch(self._prefix, self._revision + 1)
        pending = asyncio.ensure_future(anext(batches))
        silences, missed = 0, set[tuple[str, int]]()
        try:
            while True:
                done, _ = await asyncio.wait([pending], timeout=self._settings.liveness_s)
                if not done:
                    # Silence is normal; whether etcd still answers is asked for, and now and then if it kept silent.
                    silences += 1
                    if silences % AUDIT_LIVENESSES and not missed:
                        await client.head(self._prefix)
                    else:
                        missed = self._check_audit(await client.changed_at(self._prefix), missed)
                    self._confirm()
                    continue
                silences, missed = 0, set()
                changes = pending.result()
                pending = asyncio.ensure_future(anext(batches))
                for change in changes:
                    self._apply(change.key, change.value, change.revision)
                    # Never the response's own revision: while a watch catches up that is ahead of its events.
                    self._revision = max(self._revision, change.revision)
                self._confirm()
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await batches.aclose()

    def _check_audit(self, changed_at: dict[str, int], before: set[tuple[str, int]]) -> set[tuple[str, int]]:
        """What etcd has and this view has not, or the reverse; Blind if some of it was so one liveness ago too."""
        missed = changed_at.items() ^ self._changed_at.items()
        if missed & before:
            raise Blind(f"a watch has kept silent of {len(missed & before)} changes")
        return missed

    def _confirm(self) -> None:
        self._confirmed = time.monotonic()
        if not self.connected:
            self.connected = True
            log.info("view of the mesh is live", instances=len(self.records), revision=self._revision)
        self.synced.set()

    def _replace(self, listing: Listing) -> None:
        for key in [key for key in self._changed_at if key not in listing.items]:
            self._apply(key, None, 0)
        for key, value in listing.items.items():
            self._apply(key, value, listing.changed_at[key])
        self._cluster, self._revision = listing.cluster, listing.revision
        self._confirm()

    def _apply(self, key: str, value: bytes | None, revision: int) -> None:
        known = self._by_key.get(key)
        if value is None:
            self._changed_at.pop(key, None)
            if known is not None:
                del self._by_key[key]
                if self.records.get(known.instance) is known:
                    del self.records[known.instance]
                    self._announce(known, None)
            return
        self._changed_at[key] = revision
        record = _parse(key, value)
        if record is None or record == known:
            return
        old = self.records.get(record.instance)
        self._by_key[key] = self.records[record.instance] = record
        self._announce(old, record)

    def _announce(self, old: Record | None, new: Record | None) -> None:
        for observer in list(self._observers):
            self._tell(observer, old, new)

    def _tell(self, observer: Observer, old: Record | None, new: Record | None) -> None:
        try:
            observer(old, new)
        except Exception:
            log.exception("observer of the mesh failed")


def _parse(key: str, value: bytes) -> Record | None:
    try:
        record = json_format.Parse(value, Record(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        log.error("membership record cannot be read", key=key, error=str(error))
        return None
    if record.instance != key.rpartition("/")[2]:
        log.error("membership record lies under another instance's key", key=key, instance=record.instance)
        return None
    return record
