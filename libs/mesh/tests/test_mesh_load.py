"""Load reports: the latest of each domain, aged by arrival, older runs refused."""

from collections.abc import Awaitable, Callable
from typing import Any

from tidemill.mesh.v1 import common_pb2, events_pb2, membership_pb2
from tidemill_mesh.bus import Bus
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.load import LoadView, kv_subject, load_subject
from tidemill_mesh.membership import InstanceView
from tidemill_mesh.metrics import Metrics

ValueOf = Callable[[Metrics, str], float]


def report(sequence: int, incarnation: str = "i1", epoch: str = "e1", domain: int = 0) -> events_pb2.LoadReport:
    where = common_pb2.DomainRef(instance="d-1", incarnation=incarnation, domain=domain, epoch=epoch)
    return events_pb2.LoadReport(domain=where, sequence=sequence)


def record(incarnation: str, epoch: str) -> membership_pb2.MembershipRecord:
    domains = [membership_pb2.DomainRecord(domain=0, epoch=epoch)]
    return membership_pb2.MembershipRecord(instance="d-1", incarnation=incarnation, domains=domains)


class Clock:
    """A clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def view(metrics: Metrics, clock: Clock, known: membership_pb2.MembershipRecord | None = None) -> LoadView:
    instances = InstanceView(ServiceSettings())
    if known is not None:
        instances.records[known.instance] = known
        instances.connected = True
    bus: Any = None
    return LoadView(bus, instances, "default", metrics, clock)


def test_a_report_is_kept_and_ages_from_its_arrival(metrics: Metrics) -> None:
    clock = Clock()
    loads = view(metrics, clock)
    assert loads.latest("d-1", 0) is None
    assert loads.age_s("d-1", 0) == float("inf")
    assert loads.accept(report(1))
    clock.now = 2.5
    assert loads.age_s("d-1", 0) == 2.5
    assert loads.accept(report(2))
    assert loads.age_s("d-1", 0) == 0.0
    assert loads.accept(report(1, domain=1))
    assert set(loads.samples) == {("d-1", 0), ("d-1", 1)}


def test_older_sequences_incarnations_and_epochs_are_refused(metrics: Metrics, value_of: ValueOf) -> None:
    loads = view(metrics, Clock(), record("i2", "e2"))
    assert loads.accept(report(5, "i2", "e2"))
    assert not loads.accept(report(5, "i2", "e2"))
    assert not loads.accept(report(4, "i2", "e2"))
    assert not loads.accept(report(9, "i1", "e2"))
    assert not loads.accept(report(9, "i2", "e1"))
    assert loads.latest("d-1", 0) == report(5, "i2", "e2")
    assert value_of(metrics, "load_reports_refused_total") == 4


def test_while_etcd_is_away_a_run_seen_to_be_over_stays_over(metrics: Metrics) -> None:
    loads = view(metrics, Clock())
    assert loads.accept(report(100, "i1"))
    assert loads.accept(report(1, "i2"))
    assert not loads.accept(report(101, "i1"))
    assert loads.accept(report(2, "i2"))


def test_callbacks_hear_of_accepted_reports_only(metrics: Metrics) -> None:
    loads, heard = view(metrics, Clock()), []
    loads.on_report.append(lambda item: heard.append(item.sequence))
    for sequence in (1, 1, 2):
        loads.accept(report(sequence))
    assert heard == [1, 2]


def test_an_instance_that_leaves_or_returns_as_another_takes_its_samples_along(metrics: Metrics) -> None:
    loads = view(metrics, Clock())
    loads.accept(report(1, "i1"))
    loads._on_instance(record("i1", "e1"), record("i1", "e2"))
    assert loads.samples
    loads._on_instance(record("i1", "e1"), record("i2", "e1"))
    assert not loads.samples
    loads.accept(report(1, "i2"))
    loads._on_instance(record("i2", "e1"), None)
    assert not loads.samples


async def test_reports_arrive_from_the_bus_and_rubbish_is_counted(
    nats_server: Any,
    mesh_settings: Callable[..., ServiceSettings],
    metrics: Metrics,
    eventually: Callable[[Callable[[], object]], Awaitable[None]],
    value_of: ValueOf,
) -> None:
    settings = mesh_settings(nats=f"nats://{nats_server.address}")
    bus = await Bus.connect(settings, "test", metrics)
    loads = LoadView(bus, InstanceView(settings), "m-load", metrics)
    await loads.start()
    bus.publish(load_subject("m-load", "d-1"), b"\xff\xff\xff")
    bus.publish(kv_subject("m-load", "d-1"), report(7).SerializeToString())
    bus.publish(load_subject("m-load", "d-1"), report(3).SerializeToString())
    await eventually(lambda: loads.samples)
    assert loads.latest("d-1", 0) == report(3)
    assert value_of(metrics, "load_reports_refused_total") == 1
    await loads.close()
    await bus.close()
