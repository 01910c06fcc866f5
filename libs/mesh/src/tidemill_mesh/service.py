"""The frame of every service process: logs, signals, status pages, bus and membership around its main function."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from tidemill_mesh import log as logs
from tidemill_mesh.bus import Bus
from tidemill_mesh.channels import Channels
from tidemill_mesh.config import ServiceSettings, public_settings
from tidemill_mesh.config_sources import service_version
from tidemill_mesh.drain import Drain
from tidemill_mesh.errors import StartError
from tidemill_mesh.http import StatusServer
from tidemill_mesh.membership import InstanceView, Membership
from tidemill_mesh.membership.registration import INSTANCE_ID
from tidemill_mesh.metrics import Metrics
from tidemill_mesh.server import BindError, advertised_host, check_bind

# Beyond drain_s, for main to close what it opened.
CLOSE_GRACE_S = 5.0


@dataclass
class ServiceContext:
    """What main is given; all of it open, and closed after main returns."""

    settings: ServiceSettings
    service: str
    instance: str
    version: str
    log: Any
    metrics: Metrics
    bus: Bus
    membership: Membership
    instances: InstanceView
    channels: Channels
    drain: Drain
    http_endpoint: str = ""
    ready: bool = False
    started_unix_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    async def publish_run_file(self, endpoint: str, http_endpoint: str = "", **more: str) -> None:
        """Writes <run_dir>/<instance>.json with the real ports, at once or not at all; also makes /ready say so."""
        self.ready = True
        if self.settings.run_dir:
            content = {
                "service": self.service,
                "instance": self.instance,
                "version": self.version,
                "pid": os.getpid(),
                "endpoint": endpoint,
                "http_endpoint": http_endpoint or self.http_endpoint,
                "started_unix_ms": self.started_unix_ms,
                **more,
            }
            write_atomically(self.run_file(), json.dumps(content, indent=1).encode() + b"\n")

    def run_file(self) -> Path:
        """Where the run file lies."""
        return Path(self.settings.run_dir) / f"{self.instance}.json"


Main = Callable[[ServiceContext], Awaitable[None]]


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file so that readers see the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


def run_service(service: str, settings: ServiceSettings, main: Main) -> int:
    """Runs a service until its main returns; the process's exit status."""
    instance = settings.instance or f"{service}-{secrets.token_hex(3)}"
    logs.configure(settings.log_format, settings.log_level, service, instance)
    log = structlog.get_logger()
    try:
        if not INSTANCE_ID.fullmatch(instance):
            raise BindError(f"instance {instance!r} must be 1 to 63 of a-z, 0-9 and -")
        check_bind(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(service, instance, settings, main))
    except StartError as error:
        log.error("cannot start", error=str(error))
        return 1
    except Exception:
        log.exception("ended by an error")
        return 1


async def _run(service: str, instance: str, settings: ServiceSettings, main: Main) -> int:
    drain = Drain(settings.drain_s)
    _handle_signals(drain)
    async with open_context(service, instance, settings, drain) as context:
        context.log.info("starting", version=context.version, settings=public_settings(settings))
        running = asyncio.ensure_future(main(context))
        await asyncio.wait([running, asyncio.ensure_future(drain.requested.wait())], return_when="FIRST_COMPLETED")
        if not running.done():
            context.log.info("draining", drain_s=settings.drain_s)
            await asyncio.wait([running], timeout=settings.drain_s + CLOSE_GRACE_S)
        if not running.done():
            context.log.error("main did not end with the drain: cancelling it")
            running.cancel()
        drain.request()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        context.log.info("stopped")
        return 1 if running.cancelled() else 0


@contextlib.asynccontextmanager
async def open_context(
    service: str, instance: str, settings: ServiceSettings, drain: Drain
) -> AsyncIterator[ServiceContext]:
    """Opens everything a service's main is given, and closes it in the opposite order."""
    version = service_version(service)
    metrics = Metrics(service, instance, version)
    async with contextlib.AsyncExitStack() as stack:
        channels = Channels(settings)
        stack.push_async_callback(channels.close)
        bus = await Bus.connect(settings, instance, metrics)
        stack.push_async_callback(bus.close)
        instances = InstanceView(settings)
        stack.push_async_callback(instances.close)
        membership = Membership(settings)
        stack.push_async_callback(membership.close)
        context = ServiceContext(
            settings=settings,
            service=service,
            instance=instance,
            version=version,
            log=structlog.get_logger(),
            metrics=metrics,
            bus=bus,
            membership=membership,
            instances=instances,
            channels=channels,
            drain=drain,
        )
        try:
            status = StatusServer(
                settings.host,
                settings.http_port,
                settings.liveness_s,
                metrics.exposition,
                lambda: context.ready and not drain.requested.is_set(),
            )
        except OSError as error:
            raise BindError(f"cannot listen on {settings.host}:{settings.http_port}: {error}") from error
        stack.push_async_callback(status.close)
        connected = metrics.gauge("etcd_connected", "1 while etcd confirms the view of the mesh.")
        connected.set_function(lambda: float(instances.connected))
        age = metrics.gauge("etcd_view_age_seconds", "Seconds since etcd last confirmed the view of the mesh.")
        age.set_function(lambda: instances.age_s)
        context.http_endpoint = f"{advertised_host(settings)}:{status.port}"
        await instances.start()
        await membership.start()
        if settings.run_dir:
            stack.callback(lambda: context.run_file().unlink(missing_ok=True))
        yield context


def _handle_signals(drain: Drain) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if drain.requested.is_set():
            # Asked twice: whoever asks wants it gone, with or without its clean-up.
            os._exit(128 + number)
        drain.request()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
