"""Starts a kvstore: `python -m tidemill_kvstore`."""

import asyncio
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from typing import cast

from obstore.exceptions import BaseError

from tidemill.mesh.v1 import common_pb2, membership_pb2
from tidemill_kvstore.counts import Counts
from tidemill_kvstore.kvstore import KvStore
from tidemill_kvstore.open_store import open_store
from tidemill_kvstore.presence import Presence
from tidemill_kvstore.servicer import RPCS, servicers
from tidemill_kvstore.settings import KvStoreSettings
from tidemill_kvstore.store import StoreLocked
from tidemill_mesh.config import load_settings
from tidemill_mesh.server import BindError, advertised_host, serve_grpc
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_transfer.agent import TransferError, TransportName, open_agent

CONTRACT_REVISION = 1
HEARTBEAT_S = 0.25


async def run(context: ServiceContext) -> None:
    """Serves until asked to drain."""
    settings = context.settings
    assert isinstance(settings, KvStoreSettings), "a kvstore has kvstore settings"
    async with AsyncExitStack() as stack:
        try:
            kvstore = await open_kvstore(context, settings)
        except (StoreLocked, TransferError, ValueError, BaseError) as error:
            raise BindError(str(error)) from error
        stack.push_async_callback(kvstore.close)
        server = await stack.enter_async_context(serve_grpc(settings, servicers(kvstore, lambda: identity(context))))
        record = membership_pb2.MembershipRecord(
            instance=context.instance,
            role=membership_pb2.ROLE_KVSTORE,
            version=context.version,
            contract_revision=CONTRACT_REVISION,
            rpcs=RPCS,
            endpoint=server.endpoint,
            http_endpoint=context.http_endpoint,
            started_unix_ms=context.started_unix_ms,
            pid=os.getpid(),
            host=socket.gethostname(),
            transfer_address=kvstore.agent.address,
            capacity_bytes=kvstore.store.capacity_bytes,
            tells_snapshots=True,
        )
        registration = await context.membership.register(record)
        registration.on_new_incarnation.append(kvstore.presence.new_incarnation)
        kvstore.presence.new_incarnation(registration.incarnation)
        server.set_serving(True)
        await context.publish_run_file(server.endpoint)
        beat = asyncio.create_task(keep_telling(kvstore), name="kvstore presence")
        try:
            await context.drain.requested.wait()
            kvstore.draining = record.draining = True
            server.set_serving(False)
            await registration.update(record)
            if not await kvstore.idle(context.drain.deadline_s):
                context.log.warning("ending with work under way", holds=kvstore.holds)
            await registration.deregister()
        finally:
            beat.cancel()
            await asyncio.wait([beat])


async def open_kvstore(context: ServiceContext, settings: KvStoreSettings) -> KvStore:
    """Opens the folder, then the transfer agent."""
    started = time.monotonic()
    store = await asyncio.to_thread(open_store, settings)
    context.log.info(
        "store opened",
        blocks=store.num_blocks,
        used_bytes=store.used_bytes,
        bad_records=store.counters["bad_records"],
        seconds=round(time.monotonic() - started, 3),
    )
    presence = Presence(
        settings.mesh, context.instance, context.membership.incarnation, context.bus.publish, time.monotonic
    )
    presence.begin(store.take_events())
    transport = cast(TransportName, settings.transport)
    agent = await open_agent(transport, settings.host, advertise_host=advertised_host(settings).strip("[]"))
    return KvStore(settings, store, agent, presence, Counts(context.metrics))


async def keep_telling(kvstore: KvStore) -> None:
    """Heartbeats of the KV events, late events, and gauges."""
    while True:
        kvstore.tell()
        kvstore.presence.heartbeat()
        kvstore.counts.show(kvstore.store, kvstore.holds)
        await asyncio.sleep(HEARTBEAT_S)


def identity(context: ServiceContext) -> common_pb2.InstanceRef:
    """This run of the service."""
    return common_pb2.InstanceRef(instance=context.instance, incarnation=context.membership.incarnation)


def main() -> int:
    """Returns the process's exit status."""
    return run_service("kvstore", load_settings(KvStoreSettings, "kvstore"), run)


if __name__ == "__main__":
    sys.exit(main())
