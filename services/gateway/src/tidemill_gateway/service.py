"""Wires the gateway and lives its life: start, serve, drain."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.membership_pb2 import ROLE_GATEWAY, MembershipRecord
from tidemill.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tidemill_gateway.admission import Admission, AdmissionLimits
from tidemill_gateway.auth import KeyFileError, Keys, load_keys
from tidemill_gateway.bodies import Bodies
from tidemill_gateway.bounded_reads import BoundedReads
from tidemill_gateway.flow.effects import Bounds
from tidemill_gateway.flow.generation import Mesh
from tidemill_gateway.flow.placement import Placer
from tidemill_gateway.flow.reservations import Reservations
from tidemill_gateway.flow.router_client import RouterClient
from tidemill_gateway.flow.router_reports import RouterReports
from tidemill_gateway.flow.shut_pairs import shunned_by
from tidemill_gateway.flow.worker_links import WorkerLinks
from tidemill_gateway.gateway import Gateway
from tidemill_gateway.http.app import ApiApp
from tidemill_gateway.http.server import serve_http
from tidemill_gateway.inference_servicer import FULL_NAME, InferenceServicer
from tidemill_gateway.metrics import GatewayMetrics
from tidemill_gateway.models.assets import Assets
from tidemill_gateway.models.catalog import Catalog
from tidemill_gateway.overload import Overload
from tidemill_gateway.settings import GatewaySettings
from tidemill_gateway.tenants.budgets import Budgets
from tidemill_gateway.tenants.limits import LimitsFileError, LimitTable, load_limits
from tidemill_gateway.tenants.sharing import UseSharing, gateway_share
from tidemill_mesh.load import LoadView
from tidemill_mesh.server import BindError, Servicer, advertised_host, is_loopback, serve_grpc
from tidemill_mesh.service import ServiceContext

CONTRACT_REVISION = 1
TICKET_LIVENESS = 3.0
STALL_LIVENESS = 40.0
"""A domain that gives nothing for so many liveness_s, though its stream lives, has lost the request."""
ATTEMPT_DELAYS_LIVENESS = (0.0, 0.25, 1.0)
"""Before the second attempt, the third, and later ones, in liveness_s: what failed twice in a row needs time, and the
default number of attempts must outlast a pause that made every stream look dead."""
CLIENT_SILENCE_S = 10.0
"""Before a quiet client is pinged, and for its answer. A client gets more patience than a service: nothing fails over
from it, and a pause of this process or of a busy machine must not cut off all clients at once."""
YOUNG_OBJECTS = 20_000
"""Made between two looks of the collector. A request's objects free each other; Python's 700 means looks in vain."""
RESTART_S = 1.0
LOOK_S = 0.25
FRESH_S = 3.0
"""Oldest load report that is looked at; an idle instance sends one each 0.75 s."""
NOTICE_S = 0.2
"""Between "not serving" and the end of listening, for those who watch health."""

log = structlog.get_logger()


class Background:
    """Tasks of the process: long ones are started again after a fault, short ones are run to their end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a loop that should never end."""
        self._add(self._forever(name, run), name)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a piece of work to its end."""
        self._add(self._logged(work), "placement")

    async def close(self) -> None:
        """Ends them all."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _add(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forever(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await run()
            except Exception:
                log.exception("a task of the gateway failed and is started again", task=name)
            await asyncio.sleep(RESTART_S)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("a placement failed unexpectedly")


def open_keys(settings: GatewaySettings) -> Keys:
    """The API keys; BindError where others reach the gateway and no keys are given."""
    if not (settings.api_keys_file or settings.insecure or is_loopback(settings.host)):
        raise BindError(f"refusing to listen on {settings.host} without API keys: set api_keys_file, or insecure=true")
    try:
        return load_keys(settings.api_keys_file)
    except KeyFileError as error:
        raise BindError(str(error)) from error


def open_limits(settings: GatewaySettings) -> LimitTable:
    """The tenants' limits; BindError for a file that cannot be used."""
    try:
        return load_limits(settings.tenant_limits_file)
    except LimitsFileError as error:
        raise BindError(str(error)) from error


async def serve(context: ServiceContext) -> None:
    """The gateway from its first to its last moment."""
    settings = context.settings
    assert isinstance(settings, GatewaySettings), "run_service was given the gateway's settings"
    keys = open_keys(settings)
    background = Background()
    gateway, reports = build(context, settings, background)
    app = ApiApp(gateway, keys, context.metrics.exposition)
    servicer = Servicer(add_InferenceServiceServicer_to_server, InferenceServicer(gateway), FULL_NAME)
    try:
        reads = BoundedReads(gateway.bodies, keys, FULL_NAME, settings.receive_timeout_s)
        async with serve_grpc(
            settings, [servicer], peer_silence_s=CLIENT_SILENCE_S, interceptors=[reads]
        ) as grpc_server:
            tls = (settings.tls_cert, settings.tls_key)
            async with serve_http(
                app,
                settings.host,
                settings.http_api_port,
                *tls,
                slow_client_s=settings.slow_client_s,
                on_slow_client=gateway.count_slow_client,
                bodies=gateway.bodies,
                receive_timeout_s=settings.receive_timeout_s,
            ) as http_server:
                api_endpoint = f"{advertised_host(settings)}:{http_server.port}"
                registration = await context.membership.register(_record(context, grpc_server.endpoint, api_endpoint))
                grpc_server.set_serving(True)
                await context.publish_run_file(
                    grpc_server.endpoint, api_endpoint, status_endpoint=context.http_endpoint
                )
                # What start-up made lives as long as the process: the collector need not look at it again.
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS, 20, 50)
                context.log.info("serving", grpc=grpc_server.endpoint, http=api_endpoint)
                await context.drain.requested.wait()
                gateway.admission.drain()
                grpc_server.set_serving(False)
                await registration.deregister()
                await asyncio.sleep(NOTICE_S)
                await _drain(gateway, context.drain.deadline_s, grpc_server.stop)
                await http_server.end()
            await reports.flush()
    finally:
        await background.close()


def build(context: ServiceContext, settings: GatewaySettings, background: Background) -> tuple[Gateway, RouterReports]:
    """Makes all parts and starts their tasks."""
    clock = time.monotonic

    def identity() -> InstanceRef:
        return InstanceRef(instance=context.instance, incarnation=context.membership.incarnation)

    links = WorkerLinks(context.instances, context.channels, identity, settings.liveness_s, clock)
    client = RouterClient(context.instances, context.channels)
    loads = LoadView(context.bus, context.instances, settings.mesh, context.metrics)
    shunned = shunned_by(loads, FRESH_S)
    placer = Placer(context.instances, client, links, settings.liveness_s, clock, shunned)
    reservations = Reservations(clock)
    reports = RouterReports(reservations, placer.router, context.channels, client, identity)
    catalog = Catalog(context.instances, Assets(context.channels, settings.asset_cache_dir), settings.model_linger_s)
    mesh = Mesh(
        links=links,
        placer=placer,
        reservations=reservations,
        gateway=identity,
        spawn=background.spawn,
        bounds=_bounds(settings.liveness_s),
        placement_wait_s=settings.placement_wait_s,
        resume_wait_s=settings.resume_wait_s,
        clock=clock,
    )
    limits = AdmissionLimits(
        settings.max_concurrent_requests,
        settings.max_queued_requests,
        settings.max_tenant_requests,
        settings.queue_wait_s,
    )
    table = open_limits(settings)
    budgets = Budgets(table, clock, lambda: gateway_share(context.instances, context.bus))
    metrics = GatewayMetrics(context.metrics)
    budgets.on_refused = metrics.tenant_refused
    admission = Admission(limits)
    overload = Overload(settings.shed_load, settings.shed_below_priority, clock, lambda: admission.mean_request_s)
    overload.on_change, overload.on_refused = metrics.degraded, metrics.shed
    bodies = Bodies(settings.max_inflight_body_bytes)
    bodies.on_refused = metrics.body_refused
    gateway = Gateway(settings, catalog, admission, mesh, metrics, budgets, overload, bodies, clock)
    gateway.metrics.show_state(lambda: {f"held_{name}": count for name, count in gateway.holds().items()})
    gateway.metrics.show_state(gateway.counters)
    background.keep("worker links", links.run)
    background.keep("router links", client.run)
    background.keep("models", catalog.run)
    background.keep("router reports", reports.run)
    background.keep("live requests", gateway.watch)
    background.keep("load of the mesh", lambda: _watch_load(loads, overload))
    if table.any:
        sharing = UseSharing(budgets, context.bus, context.instances, settings.mesh, identity, settings.liveness_s)
        background.keep("tenants' use", sharing.run)
    return gateway, reports


async def _watch_load(loads: LoadView, overload: Overload) -> None:
    """Looks at fresh reports until cancelled; what workers said before a silence of NATS says nothing."""
    await loads.start()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            fresh = [s.report for key, s in loads.samples.items() if loads.age_s(*key) <= FRESH_S]
            overload.observe(fresh)
    finally:
        await loads.close()


def _bounds(liveness_s: float) -> Bounds:
    delays_s = tuple(share * liveness_s for share in ATTEMPT_DELAYS_LIVENESS)
    return Bounds(TICKET_LIVENESS * liveness_s, STALL_LIVENESS * liveness_s, delays_s)


def _record(context: ServiceContext, endpoint: str, http_endpoint: str) -> MembershipRecord:
    return MembershipRecord(
        instance=context.instance,
        role=ROLE_GATEWAY,
        version=context.version,
        contract_revision=CONTRACT_REVISION,
        rpcs=[f"{FULL_NAME}/{name}" for name in ("Generate", "GetModel", "ListModels", "Tokenize")],
        endpoint=endpoint,
        http_endpoint=http_endpoint,
        started_unix_ms=context.started_unix_ms,
    )


async def _drain(gateway: Gateway, deadline_s: float, stop_grpc: Callable[[float], Awaitable[None]]) -> None:
    """Running streams finish, for as long as the drain allows; new calls are refused on both APIs meanwhile."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(gateway.admission.wait_idle(), stop_grpc(deadline_s))
    left = len(gateway.admission.live_ids)
    if left:
        log.warning("the drain is over: ending what still runs", requests=left)
