"""The gRPC server of every service: limits, keepalive, TLS, health, reflection and the error interceptor."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidemill_mesh.channels import MAX_MESSAGE_BYTES, ChannelOptions, transport_options
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import StartError
from tidemill_mesh.health_servicer import HealthServicer
from tidemill_mesh.interceptor import Context, ErrorInterceptor
from tidemill_mesh.streams.server import Handler, StreamServer, serve_streams
from tidemill_mesh.streams.tls import server_tls


class BindError(StartError):
    """The address cannot, or must not, be listened on; the message names it."""


@dataclass(frozen=True)
class Servicer:
    """One gRPC service: its generated add function, its implementation and its full name.

    `streams` are methods, "package.Service/Method", that a second port offers without gRPC's threads.
    """

    add: Callable[[Any, grpc.aio.Server], None]
    servicer: Any
    full_name: str
    streams: Mapping[str, Handler] = field(default_factory=dict)


class GrpcServer:
    """A running server: where it listens and whether it says that it serves."""

    def __init__(self, server: grpc.aio.Server, port: int, endpoint: str, names: Sequence[str]) -> None:
        self.port = port
        self.endpoint = endpoint
        self.stream_endpoint = ""
        self.streams: StreamServer | None = None
        self.health = HealthServicer(names)
        self._server = server

    def set_serving(self, serving: bool) -> None:
        """Sets what health checks of the process and of each of its services answer."""
        self.health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones go on for grace_s, ends the rest."""
        self.health.end()
        streams = [self.streams.stop(grace_s)] if self.streams is not None else []
        await asyncio.gather(self._server.stop(grace_s), *streams)


@asynccontextmanager
async def serve_grpc(
    settings: ServiceSettings,
    servicers: Sequence[Servicer],
    *,
    peer_silence_s: float = 0.0,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[GrpcServer]:
    """Serves until the block ends; health says NOT_SERVING until set_serving(True). `interceptors` may raise MeshError.

    A connection whose peer has been silent for peer_silence_s (0: liveness_s, as among services) is pinged, and closed
    when no answer comes for as long again.
    """
    options = server_options(peer_silence_s or settings.liveness_s)
    server = grpc.aio.server(interceptors=(ErrorInterceptor(), *interceptors), options=options)
    port = _bind(server, settings)
    names = [item.full_name for item in servicers]
    running = GrpcServer(server, port, f"{advertised_host(settings)}:{port}", names)
    for item in servicers:
        item.add(item.servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(running.health, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    methods = {name: handler for item in servicers for name, handler in item.streams.items()}
    async with AsyncExitStack() as stack:
        if methods:
            running.streams = await stack.enter_async_context(_serve_streams(settings, methods))
            running.stream_endpoint = f"{advertised_host(settings)}:{running.streams.port}"
        await server.start()
        try:
            yield running
        finally:
            await running.stop(0.0)


@asynccontextmanager
async def _serve_streams(settings: ServiceSettings, methods: Mapping[str, Handler]) -> AsyncIterator[StreamServer]:
    try:
        listener = await serve_streams(
            settings.host,
            settings.stream_port,
            methods,
            silence_s=settings.liveness_s,
            max_message_bytes=MAX_MESSAGE_BYTES,
            tls=server_tls(settings),
        )
    except OSError as error:
        raise BindError(f"cannot listen on {settings.host}:{settings.stream_port}: {error}") from error
    try:
        yield listener
    finally:
        await listener.stop(0.0)


def server_options(peer_silence_s: float) -> ChannelOptions:
    """Options of a server; two processes must never share a port unseen."""
    return [*transport_options(peer_silence_s), ("grpc.so_reuseport", 0)]


def peer_identity(context: Context) -> str:
    """Name in the certificate that the caller proved by mutual TLS; empty without one."""
    names = context.auth_context().get("x509_common_name", ())
    return next((name.decode("utf-8", "replace") for name in names), "")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a bind to the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def advertised_host(settings: ServiceSettings) -> str:
    """The host that peers are told; IPv6 addresses in brackets."""
    if settings.advertise_host:
        return _bracketed(settings.advertise_host)
    try:
        unspecified = ipaddress.ip_address(settings.host.strip("[]")).is_unspecified
    except ValueError:
        unspecified = False
    return socket.gethostname() if unspecified else _bracketed(settings.host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_bind(settings: ServiceSettings) -> None:
    """BindError for a bind that others reach without credentials, unless the operator chose it by name."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise BindError("tls_cert and tls_key must be set together")
    if not (settings.tls_cert or settings.insecure or is_loopback(settings.host)):
        raise BindError(
            f"refusing to listen on {settings.host} without TLS: set tls_cert and tls_key, or insecure=true"
        )


def _bind(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    check_bind(settings)
    address = f"{_bracketed(settings.host)}:{settings.port}"
    try:
        if not settings.tls_cert:
            return server.add_insecure_port(address)
        pair = (Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes())
        authority = Path(settings.tls_ca).read_bytes() if settings.tls_ca else None
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=authority, require_client_auth=authority is not None
        )
        return server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise BindError(f"cannot listen on {address}: {error}") from error
