import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER, MembershipRecord
from tidemill.mesh.v1.router_pb2 import (
    Report,
    ReportResponse,
    RestoreResponse,
    RouterAnswer,
    RouterServiceConnectResponse,
)
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server
from tidemill_gateway.flow.reservations import MAX_QUEUED_REPORTS, Reservations
from tidemill_gateway.flow.router_client import CONNECT_RPC, RouterClient
from tidemill_gateway.flow.router_reports import RouterReports
from tidemill_mesh.channels import Channels
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.server import Servicer, serve_grpc
from tidemill_mesh.tasks import end


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def hold(reservations: Reservations, name: str):
    return reservations.hold("r", name, DomainRef(instance="p"), 9.0, decode=False, tokens=7)


def kinds(reservations: Reservations):
    return [(report.reservation_id, report.kind) for report in reservations.queue]


def test_the_first_end_is_the_last_report():
    reservations = Reservations(Clock())
    held = hold(reservations, "a")
    reservations.report(held, Report.KIND_PREFILLED, measured_s=0.5)
    reservations.report(held, Report.KIND_DONE)
    reservations.report(held, Report.KIND_CANCELLED)
    assert kinds(reservations) == [("a", Report.KIND_PREFILLED), ("a", Report.KIND_DONE)]
    assert not reservations.live


def test_a_placement_without_a_reservation_reports_nothing():
    reservations = Reservations(Clock())
    reservations.report(hold(reservations, ""), Report.KIND_DONE)
    assert not reservations.queue


def test_a_live_reservation_is_renewed_at_half_its_lease():
    clock = Clock()
    reservations = Reservations(clock)
    hold(reservations, "a")
    reservations.renew_due()
    assert not reservations.queue
    clock.now = 4.6
    reservations.renew_due()
    reservations.renew_due()
    assert kinds(reservations) == [("a", Report.KIND_ALIVE)]


def test_reports_that_did_not_arrive_keep_their_order_and_their_bound():
    reservations = Reservations(Clock())
    for name in ("a", "b", "c"):
        reservations.report(hold(reservations, name), Report.KIND_DONE)
    reservations.put_back(reservations.take(2))
    assert [name for name, _ in kinds(reservations)] == ["a", "b", "c"]
    for i in range(MAX_QUEUED_REPORTS):
        reservations.report(hold(reservations, f"n{i}"), Report.KIND_DONE)
    assert len(reservations.queue) == MAX_QUEUED_REPORTS
    assert reservations.dropped == 3


class RecordingRouter(RouterServiceServicer):
    """Keeps what gateways tell it."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.restored: list[str] = []
        self.unknown: list[str] = []

    async def Report(self, request, context):
        self.reports.extend(request.reports)
        return ReportResponse(unknown_reservation_ids=self.unknown)

    async def Connect(self, requests, context):
        async for request in requests:
            answers = [RouterAnswer(id=c.id, report=await self.Report(c.report, context)) for c in request.calls]
            yield RouterServiceConnectResponse(answers=answers)

    async def Restore(self, request, context):
        self.restored.extend(live.reservation_id for live in request.reservations)
        return RestoreResponse()


@pytest.fixture(params=[[], [CONNECT_RPC]], ids=["calls", "stream"])
async def told(request):
    """A router that records, and the task's parts that tell it."""
    settings = ServiceSettings()
    router = RecordingRouter()
    reservations = Reservations(Clock())
    channels = Channels(settings)
    async with contextlib.AsyncExitStack() as stack:
        servicer = Servicer(add_RouterServiceServicer_to_server, router, "tidemill.mesh.v1.RouterService")
        server = await stack.enter_async_context(serve_grpc(settings, [servicer]))
        stack.push_async_callback(channels.close)
        record = MembershipRecord(
            instance="router-1", role=ROLE_ROUTER, incarnation="one", endpoint=server.endpoint, rpcs=request.param
        )
        client = RouterClient(SimpleNamespace(records={"router-1": record}), channels)
        closing = asyncio.create_task(client.run())
        reports = RouterReports(reservations, lambda: record, channels, client, lambda: InstanceRef(instance="g"))
        stack.push_async_callback(end, closing)
        yield router, reservations, reports, record


async def test_a_new_router_is_told_of_live_reservations_once(told):
    router, reservations, reports, record = told
    hold(reservations, "a")
    await reports.flush()
    await reports.flush()
    assert router.restored == ["a"]
    record.incarnation = "two"
    await reports.flush()
    assert router.restored == ["a", "a"]


async def test_a_router_that_does_not_know_a_live_reservation_is_told_again(told):
    router, reservations, reports, _ = told
    await reports.flush()
    held = hold(reservations, "a")
    reservations.report(held, Report.KIND_ALIVE)
    router.unknown = ["a"]
    await reports.flush()
    router.unknown = []
    await reports.flush()
    assert router.restored == ["a"]


async def test_reports_wait_while_no_router_answers(told):
    router, reservations, reports, record = told
    reservations.report(hold(reservations, "a"), Report.KIND_DONE)
    endpoint, record.endpoint = record.endpoint, "127.0.0.1:1"
    await reports.flush()
    assert len(reservations.queue) == 1
    record.endpoint = endpoint
    await reports.flush()
    assert [report.reservation_id for report in router.reports] == ["a"]
    await asyncio.sleep(0)
