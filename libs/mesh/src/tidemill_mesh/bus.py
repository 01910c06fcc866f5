"""Core NATS behind one seam: publish never waits, subscribers are callbacks, the connection is rebuilt for ever.

What is published while NATS is away waits in a bounded buffer whose oldest messages are dropped and counted. Losses
are normal on this bus: publishers number what they send and receivers resync.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.log import RateLimit
from tidemill_mesh.metrics import Metrics
from tidemill_mesh.tasks import end, spawn, wait_up_to

MAX_BUFFERED_MESSAGES = 4096
MAX_BUFFERED_BYTES = 8 * 1024 * 1024
MAX_PENDING_MESSAGES = 65536
MAX_PENDING_BYTES = 64 * 1024 * 1024
RECONNECT_S = 0.25
LOG_INTERVAL_S = 10.0

Callback = Callable[[str, bytes], None]
CONNECTION_ERRORS = (OSError, nats.errors.Error, asyncio.TimeoutError)

log = structlog.get_logger()


class Subscription:
    """Interest in a subject; lives across reconnections until unsubscribed."""

    def __init__(self, bus: "Bus", subject: str, callback: Callback, max_pending_messages: int) -> None:
        self.max_pending_messages = max_pending_messages
        self.subject = subject
        self.callback = callback
        self.wire: NatsSubscription | None = None
        self._bus = bus

    async def unsubscribe(self) -> None:
        """Ends the interest; the callback is not called any more."""
        await self._bus.remove(self)


class Bus:
    """One process's connection to NATS; made by `Bus.connect`."""

    def __init__(self, settings: ServiceSettings, name: str, metrics: Metrics) -> None:
        self._settings = settings
        self._name = name
        self._subscriptions: list[Subscription] = []
        self._buffer: deque[tuple[str, bytes]] = deque()
        self._buffered_bytes = 0
        self._client: Client | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._empty = asyncio.Event()
        self._first_connection = asyncio.Event()
        self._error_log = RateLimit(LOG_INTERVAL_S, time.monotonic)
        self._slow_log = RateLimit(LOG_INTERVAL_S, time.monotonic)
        self._published = metrics.counter("bus_published_total", "Messages handed to NATS.")
        self._dropped = metrics.counter("bus_dropped_total", "Messages not sent, by reason.", ("reason",))
        self._received = metrics.counter("bus_received_total", "Messages received from NATS.")
        self._slow = metrics.counter("bus_slow_consumer_total", "Received messages dropped before their callback.")
        self._failed = metrics.counter("bus_callback_errors_total", "Callbacks that raised.")
        self._connections = metrics.counter("bus_connections_total", "Connections made to NATS.")
        self._up = metrics.gauge("bus_connected", "1 while connected to NATS.")
        self._task = spawn(self._run(), "bus")

    @classmethod
    async def connect(cls, settings: ServiceSettings, name: str, metrics: Metrics) -> "Bus":
        """A bus that keeps trying to connect; returns at the latest after a second, connected or not."""
        bus = cls(settings, name, metrics)
        if not await wait_up_to(bus._first_connection, 1.0):
            log.warning("NATS is not reachable yet; going on without it", servers=_public(settings.nats))
        return bus

    @property
    def connected(self) -> bool:
        """Whether messages flow now."""
        return self._client is not None and self._client.is_connected

    def publish(self, subject: str, payload: bytes) -> None:
        """Queues a message; never waits and never fails. Drops are counted."""
        if self._closed:
            self._dropped.labels(reason="closed").inc()
            return
        self._buffer.append((subject, payload))
        self._buffered_bytes += len(payload)
        while len(self._buffer) > MAX_BUFFERED_MESSAGES or self._buffered_bytes > MAX_BUFFERED_BYTES:
            self._take()
            self._dropped.labels(reason="buffer_full").inc()
        self._wake.set()

    async def subscribe(
        self, subject: str, callback: Callback, *, max_pending_messages: int = MAX_PENDING_MESSAGES
    ) -> Subscription:
        """Calls callback(subject, payload) for each message; it must be quick: it runs on the event loop."""
        subscription = Subscription(self, subject, callback, max_pending_messages)
        self._subscriptions.append(subscription)
        client = self._client
        if client is not None and client.is_connected:
            try:
                await self._attach(client, subscription)
                await client.flush(timeout=max(1, round(self._settings.liveness_s)))
            except CONNECTION_ERRORS as error:
                log.info("subscription waits for the next connection", subject=subject, error=str(error))
        return subscription

    async def remove(self, subscription: Subscription) -> None:
        """Ends a subscription; harmless when it has ended."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.remove(subscription)
        wire, subscription.wire = subscription.wire, None
        if wire is not None and self.connected:
            try:
                await wire.unsubscribe()
            except CONNECTION_ERRORS as error:
                log.debug("unsubscribe after the connection's end", subject=subscription.subject, error=str(error))

    async def close(self) -> None:
        """Sends what is queued if NATS is there, then closes."""
        if self.connected:
            self._empty.clear()
            self._wake.set()
            await wait_up_to(self._empty, 1.0)
        # nats-py swallows a cancellation that comes together with what it waits for: the task looks, too.
        self._closed = True
        self._wake.set()
        await end(self._task)
        self._dropped.labels(reason="closed").inc(len(self._buffer))
        self._buffer.clear()
        self._subscriptions.clear()

    async def _run(self) -> None:
        while not self._closed:
            client = Client()
            try:
                await self._open(client)
                await self._send_until_closed(client)
            except CONNECTION_ERRORS as error:
                self._log_error("NATS connection failed", error)
            except Exception:
                log.exception("NATS connection ended by an error")
            finally:
                self._client = None
                self._up.set(0)
                await self._close_client(client)
            await asyncio.sleep(RECONNECT_S)

    async def _open(self, client: Client) -> None:
        settings = self._settings
        tls = ssl.create_default_context(cafile=settings.tls_ca or None) if "tls://" in settings.nats else None
        async with asyncio.timeout(max(2.0, settings.liveness_s)):
            # Reconnection is ours: nats-py gives up for good after a refused login and cannot start without a server.
            await client.connect(
                [server.strip() for server in settings.nats.split(",")],
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_closed,
                closed_cb=self._on_closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
                connect_timeout=max(1, round(settings.liveness_s)),
                ping_interval=settings.liveness_s / 2,  # type: ignore[arg-type]
                max_outstanding_pings=1,
                user=settings.nats_user or None,
                password=settings.nats_password or None,
                tls=tls,
                flush_timeout=settings.liveness_s,
            )
            while waiting := [item for item in self._subscriptions if item.wire is None]:
                await self._attach(client, waiting[0])
        self._client = client
        self._connections.inc()
        self._up.set(1)
        self._first_connection.set()
        log.info("connected to NATS", server=_public(str(client.connected_url and client.connected_url.netloc)))

    async def _attach(self, client: Client, subscription: Subscription) -> None:
        async def deliver(message: Msg) -> None:
            if subscription not in self._subscriptions:
                return
            self._received.inc()
            try:
                subscription.callback(message.subject, message.data)
            except Exception:
                self._failed.inc()
                log.exception("bus callback failed", subject=message.subject)

        wire = await client.subscribe(
            subscription.subject,
            cb=deliver,
            pending_msgs_limit=subscription.max_pending_messages,
            pending_bytes_limit=MAX_PENDING_BYTES,
        )
        if subscription in self._subscriptions:
            subscription.wire = wire
        else:
            await wire.unsubscribe()

    async def _send_until_closed(self, client: Client) -> None:
        interval_s = self._settings.liveness_s / 3
        while client.is_connected and not self._closed:
            self._wake.clear()
            while self._buffer and client.is_connected and not self._closed:
                async with asyncio.timeout(self._settings.liveness_s):
                    await self._send(client, *self._take())
            self._empty.set()
            await wait_up_to(self._wake, interval_s)

    async def _send(self, client: Client, subject: str, payload: bytes) -> None:
        try:
            await client.publish(subject, payload)
            self._published.inc()
        except nats.errors.MaxPayloadError:
            self._dropped.labels(reason="too_large").inc()
            log.error("message is larger than NATS allows", subject=subject, bytes=len(payload))
        except CONNECTION_ERRORS:
            self._dropped.labels(reason="connection").inc()
            raise

    def _take(self) -> tuple[str, bytes]:
        subject, payload = self._buffer.popleft()
        self._buffered_bytes -= len(payload)
        return subject, payload

    async def _close_client(self, client: Client) -> None:
        for subscription in self._subscriptions:
            subscription.wire = None
        try:
            async with asyncio.timeout(1.0):
                await client.close()
        except CONNECTION_ERRORS as error:
            log.debug("NATS connection did not close cleanly", error=str(error))
        finally:
            # It has given up on a server that does not read, or is closed by a task of its own: nothing stays open.
            writer = getattr(client._transport, "_bare_io_writer", None)
            if writer is not None:
                writer.transport.abort()

    async def _on_closed(self) -> None:
        self._wake.set()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._slow.inc()
            if (suppressed := self._slow_log.passes()) is not None:
                log.warning("slow consumer: messages dropped", subject=error.subject, more=suppressed)
            return
        self._log_error("NATS error", error)

    def _log_error(self, event: str, error: BaseException) -> None:
        if (suppressed := self._error_log.passes()) is not None:
            log.warning(event, error=str(error) or type(error).__name__, more=suppressed)


def _public(servers: str) -> str:
    """Addresses without the credentials that URLs may carry."""
    parts = [urlsplit(server if "//" in server else f"//{server}") for server in servers.split(",")]
    return ",".join(f"{part.hostname}:{part.port or 4222}" for part in parts)
