"""This process's entry in the mesh: written under a lease, written again by itself after every loss."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable

import structlog
from google.protobuf import json_format

from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.log import RateLimit
from tidemill_mesh.membership.etcd import EtcdClient, EtcdError, LeaseNotFound
from tidemill_mesh.membership.lease import LeaseKeeper
from tidemill_mesh.tasks import end, spawn, wait_up_to

RETRY_S = 0.5
LOG_INTERVAL_S = 10.0
INSTANCE_ID = re.compile(r"[a-z0-9-]{1,63}")

log = structlog.get_logger()


def lease_ttl_s(liveness_s: float) -> float:
    """Lease time that outlives three of the longest stalls that still count as alive."""
    return max(5.0, 3 * liveness_s)


def instances_prefix(mesh: str) -> str:
    """Where the membership records of a mesh lie in etcd."""
    return f"/tidemill/{mesh}/instances/"


def leader_key(mesh: str, role: str) -> str:
    """Where the leader of a role is written."""
    return f"/tidemill/{mesh}/leaders/{role}"


def record_key(mesh: str, record: membership_pb2.MembershipRecord) -> str:
    """The key of a record; the last part is the instance's id."""
    role = membership_pb2.Role.Name(record.role).removeprefix("ROLE_").lower()
    return f"{instances_prefix(mesh)}{role}/{record.instance}"


class Registration:
    """One record in etcd, as this process wants it to be."""

    def __init__(self, membership: "Membership", record: membership_pb2.MembershipRecord) -> None:
        self.on_new_incarnation: list[Callable[[str], None]] = []
        self.wanted = membership_pb2.MembershipRecord()
        self.wanted.CopyFrom(record)
        self.written: tuple[int, bytes] | None = None
        self.settled = asyncio.Event()
        self._membership = membership

    @property
    def incarnation(self) -> str:
        """New at each start of the process and at each loss of its lease."""
        return self._membership.incarnation

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return record_key(self._membership.mesh, self.wanted)

    def payload(self) -> bytes:
        """The record as written: protobuf JSON, which an operator can read."""
        self.wanted.incarnation = self.incarnation
        return json_format.MessageToJson(self.wanted, indent=None, preserving_proto_field_name=True).encode()

    async def update(self, record: membership_pb2.MembershipRecord) -> None:
        """Replaces the record; returns when it is written, or when etcd is away (it follows by itself)."""
        await self._membership.update(self, record)

    async def deregister(self) -> None:
        """Takes the record out of the mesh."""
        await self._membership.remove(self)


class Membership:
    """Keeps this process's registrations in etcd; works on, and says so, while etcd is away."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.mesh = settings.mesh
        self.incarnation = secrets.token_hex(6)
        self._settings = settings
        self._registrations: list[Registration] = []
        self._wake = asyncio.Event()
        self._keeper = LeaseKeeper(settings, lease_ttl_s(settings.liveness_s), self._on_granted, self._on_lost)
        self._error_log = RateLimit(LOG_INTERVAL_S, time.monotonic)
        self._client: EtcdClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts keeping a lease; does not wait for etcd."""
        self._client = EtcdClient(self._settings)
        self._keeper.start()
        self._task = spawn(self._write_for_ever(self._client), "membership")

    async def register(self, record: membership_pb2.MembershipRecord) -> Registration:
        """Puts a record into the mesh; returns when it is there, or when etcd is away (it follows by itself)."""
        if not INSTANCE_ID.fullmatch(record.instance):
            raise ValueError(f"instance id {record.instance!r} must be 1 to 63 of a-z, 0-9 and -")
        registration = Registration(self, record)
        self._registrations.append(registration)
        await self._settle(registration)
        return registration

    async def update(self, registration: Registration, record: membership_pb2.MembershipRecord) -> None:
        """See `Registration.update`."""
        assert registration in self._registrations, "the record was deregistered"
        old_key = registration.key
        registration.wanted.CopyFrom(record)
        await self._settle(registration)
        if registration.key != old_key:
            await self._delete(old_key)

    async def remove(self, registration: Registration) -> None:
        """See `Registration.deregister`."""
        if registration in self._registrations:
            self._registrations.remove(registration)
            await self._delete(registration.key)

    async def close(self) -> None:
        """Takes all records out and gives the lease back."""
        for registration in list(self._registrations):
            await self.remove(registration)
        await self._keeper.stop()
        await end(self._task)
        if self._client is not None:
            await self._client.close()

    async def _settle(self, registration: Registration) -> None:
        assert self._client is not None, "start() comes first"
        registration.settled.clear()
        self._wake.set()
        if not await wait_up_to(registration.settled, self._settings.liveness_s):
            log.warning("membership record is not in etcd yet", key=registration.key)

    async def _delete(self, key: str) -> None:
        assert self._client is not None, "start() comes first"
        try:
            await self._client.delete(key, self._keeper.lease)
        except EtcdError as error:
            log.warning("membership record left to expire with its lease", key=key, error=str(error))

    async def _write_for_ever(self, client: EtcdClient) -> None:
        while True:
            woken = await wait_up_to(self._wake, lease_ttl_s(self._settings.liveness_s))
            self._wake.clear()
            try:
                for registration in list(self._registrations):
                    # At each tick too, where it mostly has nothing to do: etcd is to hold what is wanted, woken or not.
                    await self._write(client, registration)
                    if not woken:
                        await self._restore(client, registration)
                continue
            except LeaseNotFound:
                self._keeper.check_now()
            except EtcdError as error:
                if (suppressed := self._error_log.passes()) is not None:
                    log.warning("membership record not written", error=str(error), more=suppressed)
                await client.next_endpoint()
            except Exception:
                log.exception("membership record not written")
            await asyncio.sleep(RETRY_S)
            self._wake.set()

    async def _write(self, client: EtcdClient, registration: Registration) -> None:
        lease = self._keeper.lease
        wanted = (lease, registration.payload())
        if not lease:
            return
        if registration.written != wanted:
            await client.put(registration.key, wanted[1], lease)
            registration.written = wanted
            if registration not in self._registrations:
                await self._delete(registration.key)
        if registration.payload() == wanted[1]:
            registration.settled.set()

    async def _restore(self, client: EtcdClient, registration: Registration) -> None:
        """Puts the record back if somebody deleted it, and notices a second process of the same instance id."""
        lease = self._keeper.lease
        if not lease or registration.written is None:
            return
        found = await client.create(registration.key, registration.payload(), lease)
        if found.lease != lease:
            log.error("another process has registered as this instance", key=registration.key)

    def _on_granted(self, lease: int) -> None:
        log.debug("lease granted", lease=lease)
        self._wake.set()

    def _on_lost(self) -> None:
        self.incarnation = secrets.token_hex(6)
        log.warning("membership lost: registering again as a new incarnation", incarnation=self.incarnation)
        for registration in self._registrations:
            for callback in registration.on_new_incarnation:
                try:
                    callback(self.incarnation)
                except Exception:
                    log.exception("callback for a new incarnation failed")
        self._wake.set()
