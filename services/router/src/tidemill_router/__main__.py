"""The router process."""

import asyncio
import sys

from tidemill.mesh.v1 import router_pb2
from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER, MembershipRecord
from tidemill.mesh.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from tidemill_mesh.config import load_settings
from tidemill_mesh.load import LoadView, kv_subject
from tidemill_mesh.server import Servicer as MeshServicer
from tidemill_mesh.server import serve_grpc
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_mesh.tasks import end, spawn
from tidemill_router.app import make_parts
from tidemill_router.replica_link import reservation_subject
from tidemill_router.servicer import Servicer
from tidemill_router.settings import RouterSettings
from tidemill_router.stream import serve_calls

SERVICE_NAME = "tidemill.mesh.v1.RouterService"
CONNECT_RPC = f"{SERVICE_NAME}/Connect"
CONTRACT_REVISION = 1


async def serve(context: ServiceContext) -> None:
    """Runs the router until it is asked to drain."""
    settings = context.settings
    assert isinstance(settings, RouterSettings), "the router has its own settings"
    loads = LoadView(context.bus, context.instances, settings.mesh, context.metrics)
    parts = make_parts(context, settings, loads)
    loads.on_report.append(parts.on_report)
    await loads.start()
    subscriptions = [
        await context.bus.subscribe(kv_subject(settings.mesh), parts.feed.on_message),
        await context.bus.subscribe(reservation_subject(settings.mesh), parts.link.on_message),
    ]
    stop_observing = context.instances.subscribe(parts.on_record)
    loops = {
        "feed": parts.feed.run(),
        "snapshots": parts.fetcher.run(),
        "cards": parts.cards.run(),
        "replicas_told": parts.link.tell(),
        "replicas_asked": parts.link.fetch(),
        "housekeeping": parts.housekeeping(),
    }
    tasks = [spawn(loop, name) for name, loop in loops.items()]
    decisions = Servicer(context, parts)
    streams = {CONNECT_RPC: lambda stream: serve_calls(stream, decisions)}
    servicer = MeshServicer(add_RouterServiceServicer_to_server, decisions, SERVICE_NAME, streams)
    async with serve_grpc(settings, [servicer]) as server:
        registration = await context.membership.register(_record(context, server.endpoint, server.stream_endpoint))
        server.set_serving(True)
        await context.publish_run_file(server.endpoint)
        context.log.info("serving", endpoint=server.endpoint)
        await context.drain.requested.wait()
        server.set_serving(False)
        await registration.deregister()
        await server.stop(min(1.0, context.drain.deadline_s))
    stop_observing()
    for subscription in subscriptions:
        await subscription.unsubscribe()
    await loads.close()
    await asyncio.gather(*(end(task) for task in tasks))


def _record(context: ServiceContext, endpoint: str, stream_endpoint: str) -> MembershipRecord:
    methods = router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods_by_name
    return MembershipRecord(
        instance=context.instance,
        incarnation=context.membership.incarnation,
        role=ROLE_ROUTER,
        version=context.version,
        contract_revision=CONTRACT_REVISION,
        rpcs=[f"{SERVICE_NAME}/{name}" for name in methods],
        endpoint=endpoint,
        stream_endpoint=stream_endpoint,
        http_endpoint=context.http_endpoint,
        started_unix_ms=context.started_unix_ms,
    )


def main() -> int:
    """Entry point of tidemill-router."""
    return run_service("router", load_settings(RouterSettings, "router"), serve)


if __name__ == "__main__":
    sys.exit(main())
