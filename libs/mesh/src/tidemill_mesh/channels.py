"""Channels to other services: one factory, with limits and keepalive that both sides share."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.streams.client import ClientStream, open_stream
from tidemill_mesh.tasks import end, spawn

# Larger than any prompt of a million token ids and than the chunks of a snapshot; bulk bytes never travel by gRPC.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# An instance that only lost its lease comes back with its streams alive.
FORGET_GRACE_S = 600.0

ChannelOptions = list[tuple[str, int | str]]

log = structlog.get_logger()


def transport_options(liveness_s: float) -> ChannelOptions:
    """Options of both ends of a connection: a frozen peer is noticed within about 2 x liveness_s.

    Not sooner: a machine that stands still for a moment must not cut all connections of its services at once. Streams
    between gateways and workers have pings of their own, which are judged by time in which the judge itself ran.

    Without grpc.http2.ping_timeout_ms gRPC waits 60 s for the answer to a keepalive ping, whatever
    grpc.keepalive_timeout_ms says. A server that counts ping strikes would end quiet connections with
    too_many_pings, so neither side counts them.
    """
    silence_ms = max(100, round(liveness_s * 1000))
    return [
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def client_options(liveness_s: float) -> ChannelOptions:
    """Options of a channel: also quick to connect again, and never through an HTTP proxy."""
    return [
        *transport_options(liveness_s),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", max(500, round(liveness_s * 1000))),
        ("grpc.max_reconnect_backoff_ms", max(500, round(liveness_s * 1000))),
    ]


def connect(endpoint: str, settings: ServiceSettings) -> grpc.aio.Channel:
    """A channel to host:port; with TLS when this process's settings have it."""
    options = client_options(settings.liveness_s)
    if not (settings.tls_cert or settings.tls_ca):
        return grpc.aio.insecure_channel(endpoint, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(settings.tls_ca),
        private_key=_read(settings.tls_key),
        certificate_chain=_read(settings.tls_cert),
    )
    return grpc.aio.secure_channel(endpoint, credentials, options=options)


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


class Channels:
    """One channel for each endpoint that this process talks to."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._forgotten: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to an endpoint, opened at its first use."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = connect(endpoint, self._settings)
        return channel

    async def open_stream(self, method: str, endpoints: Sequence[str]) -> ClientStream:
        """A call of "package.Service/Method" on a connection of its own, to the first endpoint that can be reached.

        AioRpcError (UNAVAILABLE) when none can within liveness_s.
        """
        known = [endpoint for endpoint in endpoints if endpoint]
        for i, endpoint in enumerate(known):
            try:
                return await open_stream(
                    endpoint,
                    method,
                    self._settings,
                    timeout_s=self._settings.liveness_s / len(known),
                    max_message_bytes=MAX_MESSAGE_BYTES,
                )
            except grpc.aio.AioRpcError as error:
                if i + 1 == len(known):
                    raise
                log.warning("a stream goes to another port of its peer", wanted=endpoint, reason=error.details())
        raise AssertionError("a peer has at least one endpoint")

    def forget(self, endpoint: str) -> None:
        """Drops the channel to an endpoint; calls still running on it may end by themselves first."""
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            self._forgotten[channel] = spawn(self._close_later(channel), f"close {endpoint}")

    async def close(self) -> None:
        """Closes all channels; running calls end with CANCELLED."""
        forgotten, self._forgotten = self._forgotten, {}
        for task in forgotten.values():
            await end(task)
        channels = [*self._channels.values(), *forgotten]
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _close_later(self, channel: grpc.aio.Channel) -> None:
        # Not close(grace): a channel that is closing so cannot be closed at once any more.
        await asyncio.sleep(FORGET_GRACE_S)
        del self._forgotten[channel]
        await channel.close()
