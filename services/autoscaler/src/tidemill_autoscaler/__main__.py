"""Wires the autoscaler."""

import os
import socket
import sys
from pathlib import Path

from tidemill.mesh.v1 import autoscaler_pb2_grpc, common_pb2
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill_autoscaler.actuator import Actuator, LocalActuator, NoActuator, read_templates
from tidemill_autoscaler.controller import Controller, Pool
from tidemill_autoscaler.decision import PoolPlanner
from tidemill_autoscaler.servicer import AutoscalerServicer
from tidemill_autoscaler.settings import ROLES, AutoscalerSettings
from tidemill_autoscaler.view import PoolView
from tidemill_mesh.config import load_settings
from tidemill_mesh.load import LoadView
from tidemill_mesh.membership import Election, Registration
from tidemill_mesh.membership.registration import leader_key, lease_ttl_s
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_mesh.tasks import wait_up_to

SERVICE = "tidemill.mesh.v1.AutoscalerService"


def main() -> int:
    """Entry point of the process."""
    settings = load_settings(AutoscalerSettings, "autoscaler")
    return run_service("autoscaler", settings, lambda context: serve(context, settings))


async def serve(context: ServiceContext, settings: AutoscalerSettings) -> None:
    """Serves until the drain is asked for. Workers that were started stay: the next autoscaler adopts them."""
    loads = LoadView(context.bus, context.instances, settings.mesh, context.metrics)
    key = leader_key(settings.mesh, "autoscaler")
    election = Election(settings, key, lease_ttl_s(settings.liveness_s), context.instance)
    controller = make_controller(context, settings, loads, election)
    registration: Registration | None = None

    def instance() -> common_pb2.InstanceRef:
        incarnation = registration.incarnation if registration else ""
        return common_pb2.InstanceRef(instance=context.instance, incarnation=incarnation)

    servicer = AutoscalerServicer(controller, instance, settings.bounds_file)
    added = Servicer(autoscaler_pb2_grpc.add_AutoscalerServiceServicer_to_server, servicer, SERVICE)
    await loads.start()
    await election.start()
    try:
        async with serve_grpc(settings, [added]) as server:
            registration = await context.membership.register(make_record(context, server.endpoint))
            server.set_serving(True)
            await context.publish_run_file(server.endpoint)
            await run(context, settings, controller)
            await registration.deregister()
    finally:
        await election.close()
        await loads.close()


async def run(context: ServiceContext, settings: AutoscalerSettings, controller: Controller) -> None:
    """Steps at each tick until the drain is asked for."""
    while not context.drain.requested.is_set():
        try:
            controller.step(source_healthy=context.bus.connected)
        except Exception:
            context.log.exception("a step failed; the next one follows")
        await wait_up_to(context.drain.requested, settings.tick_s)


def make_controller(
    context: ServiceContext, settings: AutoscalerSettings, loads: LoadView, election: Election
) -> Controller:
    """One pool for each role."""
    pools = [
        Pool(
            role=role,
            view=PoolView(role, settings.model, context.instances, loads),
            planner=PoolPlanner(settings.bounds(role), settings.policy()),
        )
        for role in ROLES
    ]
    return Controller(pools, make_actuator(settings), election, context.metrics)


def make_actuator(settings: AutoscalerSettings) -> Actuator:
    """The one the settings name."""
    if settings.actuator == "none":
        return NoActuator()
    run_dir = Path(settings.run_dir)
    templates = read_templates(Path(settings.templates), ROLES)
    return LocalActuator(templates, run_dir, Path(settings.log_dir or settings.run_dir), settings.stop_limit_s)


def make_record(context: ServiceContext, endpoint: str) -> MembershipRecord:
    """What the mesh is told of this process."""
    return MembershipRecord(
        instance=context.instance,
        role=Role.ROLE_AUTOSCALER,
        version=context.version,
        contract_revision=1,
        rpcs=[f"{SERVICE}/{name}" for name in ("GetAutoscalerStatus", "SetBounds")],
        endpoint=endpoint,
        http_endpoint=context.http_endpoint,
        started_unix_ms=context.started_unix_ms,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


if __name__ == "__main__":
    sys.exit(main())
