"""The only file that knows etcd: its calls on aetcd's stubs, with our own channel options, deadlines and login.

aetcd's high-level client neither resumes watches nor passes channel options for keepalive, so only its stubs serve.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from aetcd import rpc

from tidemill_mesh.channels import ChannelOptions, client_options
from tidemill_mesh.config import ServiceSettings

# etcd ends connections that ping more often than each 5 s (--grpc-keepalive-min-time).
KEEPALIVE_MS = 6000

T = TypeVar("T")


class EtcdError(Exception):
    """etcd did not answer, or refused; the message says which."""


class LeaseNotFound(EtcdError):
    """The lease has expired or was revoked."""


class Compacted(EtcdError):
    """The revision to watch from is gone: list again."""


@dataclass(frozen=True)
class Listing:
    """All keys under a prefix as of one revision of one cluster, each with the revision of its last change."""

    cluster: int
    revision: int
    items: dict[str, bytes]
    changed_at: dict[str, int]


@dataclass(frozen=True)
class Change:
    """One key's new value; None: deleted."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Holder:
    """Who holds a key made by `create`, and the revision at which it was made."""

    lease: int
    create_revision: int
    value: bytes


def prefix_end(prefix: bytes) -> bytes:
    """The end of the key range that has the prefix."""
    assert prefix.isascii(), "prefixes are ASCII"
    return prefix[:-1] + bytes([prefix[-1] + 1])


def etcd_options(liveness_s: float) -> ChannelOptions:
    """Options of a channel to etcd, which polices pings."""
    kept = [item for item in client_options(liveness_s) if not item[0].startswith("grpc.keepalive")]
    return [
        *kept,
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", max(100, round(liveness_s * 1000))),
        ("grpc.keepalive_permit_without_calls", 0),
    ]


def _endpoints(settings: ServiceSettings) -> list[str]:
    return [part.strip() for part in settings.etcd.split(",") if part.strip()]


def _credentials(settings: ServiceSettings) -> grpc.ChannelCredentials:
    files = [settings.tls_ca, settings.tls_key, settings.tls_cert]
    ca, key, cert = (Path(path).read_bytes() if path else None for path in files)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _open(settings: ServiceSettings, endpoint: str, factory: Any) -> Any:
    options = etcd_options(settings.liveness_s)
    address = endpoint.removeprefix("https://").removeprefix("http://")
    if endpoint.startswith("https://"):
        return factory.secure_channel(address, _credentials(settings), options=options)
    return factory.insecure_channel(address, options=options)


def _translate(error: grpc.RpcError) -> EtcdError:
    text = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    if "requested lease not found" in text:
        return LeaseNotFound(text)
    return EtcdError(text)


def _is_expired_login(error: grpc.RpcError) -> bool:
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or "user name is empty" in str(error.details())  # type: ignore[attr-defined]


class LeaseClient:
    """Blocking lease calls, for a thread that must keep a lease alive while the event loop is stuck."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._endpoints = _endpoints(settings)
        self._token: tuple[tuple[str, str], ...] = ()
        self._connect()

    def _connect(self) -> None:
        self._channel = _open(self._settings, self._endpoints[0], grpc)
        self._lease = rpc.LeaseStub(self._channel)
        # One message each way: as a unary call it needs no thread to feed a request stream.
        self._keepalive = self._channel.unary_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )

    def next_endpoint(self) -> None:
        """Turns to the next endpoint after a failure; with one endpoint its channel reconnects by itself."""
        if len(self._endpoints) > 1:
            self._endpoints.append(self._endpoints.pop(0))
            self._channel.close()
            self._connect()

    def grant(self, ttl_s: int, timeout_s: float) -> int:
        """The id of a new lease."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        return int(self._call(lambda: self._lease.LeaseGrant(request, timeout=timeout_s, metadata=self._token)).ID)

    def keep_alive(self, lease: int, timeout_s: float) -> float:
        """Renews the lease; seconds it now has; 0: it is lost."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)
        return float(self._call(lambda: self._renew(request, timeout_s)).TTL)

    def revoke(self, lease: int, timeout_s: float) -> None:
        """Ends the lease and deletes its keys."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        self._call(lambda: self._lease.LeaseRevoke(request, timeout=timeout_s, metadata=self._token))

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def _renew(self, request: Any, timeout_s: float) -> Any:
        call = self._keepalive(request, timeout=timeout_s, metadata=self._token)
        try:
            return next(call)
        finally:
            call.cancel()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            if not (self._settings.etcd_user and _is_expired_login(error)):
                raise _translate(error) from error
        try:
            self._token = self._log_in()
            return call()
        except grpc.RpcError as error:
            raise _translate(error) from error

    def _log_in(self) -> tuple[tuple[str, str], ...]:
        request = rpc.AuthenticateRequest(name=self._settings.etcd_user, password=self._settings.etcd_password)
        answer = rpc.AuthStub(self._channel).Authenticate(request, timeout=self._settings.liveness_s)
        return (("token", answer.token),)


class EtcdClient:
    """Key calls and watches on the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._endpoints = _endpoints(settings)
        self._token: tuple[tuple[str, str], ...] = ()
        self._connect()

    def _connect(self) -> None:
        self._channel: grpc.aio.Channel = _open(self._settings, self._endpoints[0], grpc.aio)
        self._kv = rpc.KVStub(self._channel)
        self._watch = rpc.WatchStub(self._channel)

    async def next_endpoint(self) -> None:
        """Turns to the next endpoint after a failure; with one endpoint its channel reconnects by itself."""
        if len(self._endpoints) > 1:
            self._endpoints.append(self._endpoints.pop(0))
            await self._channel.close()
            self._connect()

    async def list_keys(self, prefix: str) -> Listing:
        """All keys under the prefix."""
        return await self._list(prefix)

    async def changed_at(self, prefix: str) -> dict[str, int]:
        """The revision of the last change of each key under the prefix; carries no values."""
        return (await self._list(prefix, keys_only=True)).changed_at

    async def head(self, prefix: str) -> Listing:
        """The cluster's id and revision, without keys; also shows that etcd answers."""
        return await self._list(prefix, count_only=True)

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Writes a key that lives as long as the lease; LeaseNotFound if that is gone."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        await self._call(lambda: self._kv.Put(request, timeout=self._settings.liveness_s, metadata=self._token))

    async def delete(self, key: str, lease: int) -> None:
        """Deletes a key if it lives under this lease: a successor may have written it meanwhile."""
        name = key.encode()
        ours = rpc.Compare(key=name, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=lease)
        delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))
        request = rpc.TxnRequest(compare=[ours], success=[delete])
        await self._call(lambda: self._kv.Txn(request, timeout=self._settings.liveness_s, metadata=self._token))

    async def create(self, key: str, value: bytes, lease: int) -> Holder:
        """Makes the key unless it exists; in both cases says who holds it now."""
        name = key.encode()
        absent = rpc.Compare(key=name, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=value, lease=lease))
        get = rpc.RequestOp(request_range=rpc.RangeRequest(key=name))
        request = rpc.TxnRequest(compare=[absent], success=[put, get], failure=[get])
        answer = await self._call(
            lambda: self._kv.Txn(request, timeout=self._settings.liveness_s, metadata=self._token)
        )
        found = answer.responses[-1].response_range.kvs[0]
        return Holder(found.lease, found.create_revision, found.value)

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[list[Change], None]:
        """Batches of changes from start_revision on; the first is empty and says that the watch stands."""
        start = prefix.encode()
        create = rpc.WatchCreateRequest(key=start, range_end=prefix_end(start), start_revision=start_revision)
        # A member cut off from its leader would stay silent; with this it ends the watch.
        call = self._watch.Watch(metadata=(*self._token, ("hasleader", "true")))
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            while (answer := await call.read()) is not grpc.aio.EOF:
                if answer.compact_revision:
                    raise Compacted(f"revision {start_revision} was compacted up to {answer.compact_revision}")
                if answer.canceled:
                    raise EtcdError(f"watch cancelled: {answer.cancel_reason}")
                yield [_change(event) for event in answer.events]
            raise EtcdError("watch ended")
        except grpc.aio.AioRpcError as error:
            raise _translate(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _list(self, prefix: str, **options: bool) -> Listing:
        start = prefix.encode()
        request = rpc.RangeRequest(key=start, range_end=prefix_end(start), **options)
        answer = await self._call(
            lambda: self._kv.Range(request, timeout=self._settings.liveness_s, metadata=self._token)
        )
        items = {_text(item.key): item.value for item in answer.kvs}
        changed_at = {_text(item.key): item.mod_revision for item in answer.kvs}
        return Listing(answer.header.cluster_id, answer.header.revision, items, changed_at)

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if not (self._settings.etcd_user and _is_expired_login(error)):
                raise _translate(error) from error
        try:
            self._token = await self._log_in()
            return await call()
        except grpc.aio.AioRpcError as error:
            raise _translate(error) from error

    async def _log_in(self) -> tuple[tuple[str, str], ...]:
        request = rpc.AuthenticateRequest(name=self._settings.etcd_user, password=self._settings.etcd_password)
        answer = await rpc.AuthStub(self._channel).Authenticate(request, timeout=self._settings.liveness_s)
        return (("token", answer.token),)


def _change(event: Any) -> Change:
    value = None if event.type == rpc.Event.DELETE else event.kv.value
    return Change(_text(event.kv.key), value, event.kv.mod_revision)


def _text(key: bytes) -> str:
    return key.decode("utf-8", "replace")
