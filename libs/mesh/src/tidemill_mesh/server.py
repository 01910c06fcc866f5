"""The gRPC server of every service: limits, keepalive, TLS, health, reflection and the error interceptor."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidemill_mesh.channels import ChannelOptions, transport_options
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.interceptor import Context, ErrorInterceptor
from tidemill_mesh.tasks import end, spawn

OVERALL = ""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = structlog.get_logger()


class BindError(Exception):
    """The address cannot, or must not, be listened on; the message names it."""


@dataclass(frozen=True)
class Servicer:
    """One gRPC service: its generated add function, its implementation and its full name."""

    add: Callable[[Any, grpc.aio.Server], None]
    servicer: Any
    full_name: str


class GrpcServer:
    """A running server: where it listens and whether it says that it serves."""

    def __init__(self, server: grpc.aio.Server, port: int, endpoint: str, names: Sequence[str]) -> None:
        self.port = port
        self.endpoint = endpoint
        self.health = health.aio.HealthServicer()
        self._server = server
        self._names = (OVERALL, *names)
        self._serving = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Sets what health checks of the process and of each of its services answer."""
        self._serving = serving
        self._changed.set()

    async def apply_health(self) -> None:
        """Runs for the server's life and hands changes on to those who watch."""
        while True:
            self._changed.clear()
            status = SERVING if self._serving else NOT_SERVING
            for name in self._names:
                await self.health.set(name, status)
            await self._changed.wait()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones go on for grace_s, ends the rest."""
        await self.health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


@asynccontextmanager
async def serve_grpc(
    settings: ServiceSettings, servicers: Sequence[Servicer], *, peer_silence_s: float = 0.0
) -> AsyncIterator[GrpcServer]:
    """Serves until the block ends; health says NOT_SERVING until set_serving(True).

    A connection whose peer has been silent for peer_silence_s (0: liveness_s, as among services) is closed.
    """
    options = server_options(peer_silence_s or settings.liveness_s)
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=options)
    port = _bind(server, settings)
    names = [item.full_name for item in servicers]
    running = GrpcServer(server, port, f"{advertised_host(settings)}:{port}", names)
    for item in servicers:
        item.add(item.servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(running.health, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    await server.start()
    task = spawn(running.apply_health(), "grpc health")
    try:
        yield running
    finally:
        await end(task)
        await running.stop(0.0)


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
