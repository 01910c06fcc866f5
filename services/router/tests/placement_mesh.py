"""A router over records and load reports that a test sets, without a process."""

import random
from dataclasses import dataclass, field
from typing import Any

from tidemill.mesh.v1.common_pb2 import DomainRef, InstanceRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, DomainRecord, MembershipRecord, ModelRef, Role
from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
)
from tidemill_kvcache.hashing import chain_root, hash_blocks, join_hashes
from tidemill_kvcache.index import BlockIndex
from tidemill_mesh.load import LoadSample
from tidemill_router.candidate import Costs, ModelFacts
from tidemill_router.fences import Fences
from tidemill_router.report_times import ReportTimes
from tidemill_router.reservations import Reservations
from tidemill_router.router import Router
from tidemill_router.turnover import Turnover
from tidemill_router.view import MeshView

REVISION = "rev-a"
GATEWAY = InstanceRef(instance="g-0", incarnation="gi")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Instances:
    records: dict[str, MembershipRecord] = field(default_factory=dict)
    connected: bool = True


@dataclass
class Loads:
    samples: dict[tuple[str, int], LoadSample] = field(default_factory=dict)


class Mesh:
    """A router over records and load reports that the test sets."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = Clock()
        self.instances, self.loads, self.index = Instances(), Loads(), BlockIndex(1 << 24)
        self.fences = Fences(self.clock)
        self.reservations = Reservations("r1", 9.0, self.clock, Turnover(300.0, self.clock))
        self.times = ReportTimes(self.clock)
        self.view = MeshView(self.instances, self.loads, self.fences, self.reservations, self.times, self.clock)
        self.facts: ModelFacts | None = ModelFacts(32, 10_000)
        self.router = Router(
            self.view, self.index, self.reservations, lambda _: self.facts, Costs(), 60.0, random.Random(seed)
        )

    def add(
        self,
        name: str,
        role: "Role.ValueType",
        *,
        revision: str = REVISION,
        domains: int = 1,
        draining: bool = False,
        kv_format: str = "",
    ) -> None:
        record = MembershipRecord(
            instance=name,
            incarnation=f"{name}-i",
            role=role,
            endpoint=f"{name}:1",
            draining=draining,
            domains=[DomainRecord(domain=d, epoch=f"{name}-e", num_blocks=1000) for d in range(domains)],
            models=[ModelRef(name="m", revision=revision, kv_format=kv_format)],
        )
        self.instances.records[name] = record
        self.view.see(record)
        for domain in range(domains):
            self.report(name, domain)

    def report(self, name: str, domain: int = 0, *, epoch: str = "", **load: Any) -> None:
        ref = DomainRef(instance=name, incarnation=f"{name}-i", domain=domain, epoch=epoch or f"{name}-e")
        values = {"total_blocks": 1000, "available_blocks": 1000, "prefill_tokens_per_s": 1000.0, **load}
        report = LoadReport(domain=ref, **values)
        self.loads.samples[(name, domain)] = LoadSample(report, self.clock.now)
        self.times.on_report(report)

    def place(self, hashes: list[bytes] | None = None, tokens: int = 1000, **more: Any) -> PlacePrefillResponse:
        values = {"request_id": "q", "gateway": GATEWAY, "model_revision": REVISION, "max_tokens": 64, **more}
        packed = join_hashes(hashes or [])
        return self.router.place_prefill(PlacePrefillRequest(prompt_tokens=tokens, block_hashes=packed, **values))

    def place_decode(self, hashes: list[bytes] | None = None, tokens: int = 1000, **more: Any) -> PlaceDecodeResponse:
        values = {"request_id": "q", "gateway": GATEWAY, "model_revision": REVISION, "max_tokens": 64, **more}
        packed = join_hashes(hashes or [])
        return self.router.place_decode(PlaceDecodeRequest(context_tokens=tokens, block_hashes=packed, **values))


def pair(seed: int = 0) -> Mesh:
    """One prefill and one decode instance."""
    mesh = Mesh(seed)
    mesh.add("p-0", ROLE_PREFILL)
    mesh.add("d-0", ROLE_DECODE)
    return mesh


def prompt(first: int, blocks: int) -> list[bytes]:
    return hash_blocks(chain_root(b"m", b""), range(first, first + blocks), 1)
