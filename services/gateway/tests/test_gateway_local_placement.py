"""Placement while no router answers: by membership, own streams, and pairs between which no KV arrives, or damaged."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.mesh.v1.common_pb2 import DomainRef, Target
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, DomainRecord, MembershipRecord, ModelRef
from tidemill.mesh.v1.router_pb2 import PlaceDecodeRequest, PlacePrefillRequest
from tidemill_gateway.flow.placement import Placer
from tidemill_gateway.flow.shut_pairs import shunned_by
from tidemill_mesh.load import LoadSample

FRESH_S = 3.0


class Fleet:
    """Two instances of each role, whose load reports a gateway hears; it has streams to all, and no router."""

    def __init__(self) -> None:
        roles = {"p-0": ROLE_PREFILL, "p-1": ROLE_PREFILL, "d-0": ROLE_DECODE, "d-1": ROLE_DECODE}
        records = {name: self.record(name, role) for name, role in roles.items()}
        self.age_s = 0.0
        self.samples: dict[tuple[str, int], LoadSample] = {}
        link = SimpleNamespace(up=True, legs={})
        instances: Any = SimpleNamespace(records=records)
        links: Any = SimpleNamespace(get=lambda instance, incarnation: link)
        client: Any = SimpleNamespace()
        loads: Any = SimpleNamespace(samples=self.samples, age_s=lambda instance, domain: self.age_s)
        self.placer = Placer(instances, client, links, 2.0, lambda: 0.0, shunned_by(loads, FRESH_S))

    def record(self, name: str, role: Any) -> MembershipRecord:
        return MembershipRecord(
            role=role,
            instance=name,
            incarnation="i",
            endpoint=f"{name}:1",
            domains=[DomainRecord(domain=0, epoch="e")],
            models=[ModelRef(revision="r")],
        )

    def report(self, name: str, quarantined: list[str]) -> None:
        self.samples[name, 0] = LoadSample(LoadReport(quarantined=quarantined), 0.0)

    def report_silent(self, name: str, silent: list[str]) -> None:
        refs = [DomainRef(instance=source, incarnation="i", epoch="e") for source in silent]
        self.samples[name, 0] = LoadSample(LoadReport(silent=refs), 0.0)

    async def prefill(self) -> tuple[str, bool]:
        """Where a request starts, and whether it stays there."""
        response, bypassed = await self.placer.prefill(PlacePrefillRequest(model_revision="r"), 0.0, lambda: True)
        assert bypassed
        return response.target.domain.instance, response.whole

    async def decode(self, source: str) -> str:
        request = PlaceDecodeRequest(model_revision="r", prefill=Target(domain=DomainRef(instance=source)))
        response, _ = await self.placer.decode(request, 0.0, lambda: True)
        return response.target.domain.instance


async def test_kv_goes_where_it_arrives_whole() -> None:
    fleet = Fleet()
    assert await fleet.decode("p-0") == "d-0"
    fleet.report("d-0", ["p-0"])
    assert (await fleet.decode("p-0"), await fleet.decode("p-1")) == ("d-1", "d-0")
    assert await fleet.prefill() == ("p-0", False), "another decode instance takes its KV"


async def test_kv_goes_where_it_arrives_at_all() -> None:
    fleet = Fleet()
    fleet.report_silent("d-0", ["p-0"])
    assert (await fleet.decode("p-0"), await fleet.decode("p-1")) == ("d-1", "d-0")
    fleet.report_silent("d-1", ["p-0"])
    assert await fleet.prefill() == ("p-1", False)


async def test_a_prefill_instance_whose_kv_nobody_takes_gets_no_prompt() -> None:
    fleet = Fleet()
    for name in ("d-0", "d-1"):
        fleet.report(name, ["p-0"])
    assert await fleet.prefill() == ("p-1", False)
    for name in ("d-0", "d-1"):
        fleet.report(name, ["p-0", "p-1"])
    assert await fleet.prefill() == ("d-0", True), "decode computes the prompt itself"


@pytest.mark.parametrize("age_s", [0.0, FRESH_S + 1.0])
async def test_it_is_advice_and_ends_with_the_reports(age_s: float) -> None:
    fleet = Fleet()
    for name in ("d-0", "d-1"):
        fleet.report(name, ["p-0", "p-1"])
    fleet.age_s = age_s
    assert await fleet.decode("p-0") == "d-0", "KV that is computed is tried where nobody else takes it"
    assert (await fleet.prefill())[1] == (age_s <= FRESH_S)
