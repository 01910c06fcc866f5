"""A real router process on real etcd and NATS, and emulated workers: no engine, but the mesh's own protocol."""

import asyncio
import contextlib
import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L3, DomainRef, InstanceRef
from tidemill.mesh.v1.events_pb2 import KvEvent, LoadReport
from tidemill.mesh.v1.membership_pb2 import (
    ROLE_GATEWAY,
    ROLE_KVSTORE,
    DomainRecord,
    MembershipRecord,
    ModelCard,
    ModelRef,
    Role,
)
from tidemill.mesh.v1.router_pb2 import (
    GetRouterStatusRequest,
    GetRouterStatusResponse,
    InstanceView,
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
    Report,
    ReportRequest,
    ReportResponse,
)
from tidemill.mesh.v1.router_pb2_grpc import RouterServiceStub
from tidemill.mesh.v1.worker_pb2 import GetAssetRequest, GetAssetResponse, GetSnapshotRequest, GetSnapshotResponse
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from tidemill_kvcache.events import EventSequencer, cleared_event, removed_event, stored_event
from tidemill_kvcache.hashing import join_hashes
from tidemill_kvcache.mirror import BlockMirror
from tidemill_local import processes
from tidemill_local.home import Home
from tidemill_local.servers import start_etcd, start_nats
from tidemill_mesh.bus import Bus
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.load import kv_subject, load_subject
from tidemill_mesh.membership import Membership
from tidemill_mesh.membership.registration import Registration
from tidemill_mesh.metrics import Metrics
from tidemill_mesh.server import Servicer, serve_grpc

sys.path.insert(0, str(Path(__file__).parent))

BLOCK = 32
REVISION = "rev-a"
# A test, or a server of it, that is not run for seconds is to lose neither its lease nor what it has sent.
LIVENESS_S = 6.0
GATEWAY = InstanceRef(instance="gateway-t", incarnation="g1")


@dataclass
class Servers:
    """etcd and NATS."""

    home: Home
    etcd: processes.ProcessRecord
    etcd_port: int
    nats: processes.ProcessRecord
    nats_port: int

    @classmethod
    def start(cls, folder: Path) -> "Servers":
        home = Home(folder)
        home.prepare()
        servers = cls(home, *start_etcd(home, "127.0.0.1"), *start_nats(home, "127.0.0.1"))
        for port in (servers.etcd_port, servers.nats_port):
            wait_for_port(port)
        return servers

    def stop(self) -> None:
        for record in (self.etcd, self.nats):
            processes.kill(record)
            processes.wait_gone(record, 60.0)


def wait_for_port(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.02)


class EmulatedWorkerServicer(WorkerServiceServicer):
    """Snapshots and the model card of an emulated worker."""

    def __init__(self, worker: "EmulatedWorker") -> None:
        self._worker = worker

    async def GetSnapshot(self, request: GetSnapshotRequest, context: Any) -> AsyncIterator[GetSnapshotResponse]:
        worker = self._worker
        worker.snapshots_asked += 1
        if worker.snapshots_hang:
            await asyncio.sleep(3600)
        batches = worker.sequencer.replay(request.known, request.known_sequence)
        if batches is not None:
            yield GetSnapshotResponse(domain=worker.domain, replay=True, batches=batches, last=True)
            return
        runs, sequence = worker.mirror.runs(), worker.sequencer.sequence
        for run in runs:
            yield GetSnapshotResponse(domain=worker.domain, sequence=sequence, blocks=[run])
        yield GetSnapshotResponse(domain=worker.domain, sequence=sequence, last=True)

    async def GetAsset(self, request: GetAssetRequest, context: Any) -> AsyncIterator[GetAssetResponse]:
        card = self._worker.card
        yield GetAssetResponse(data=card[:10])
        yield GetAssetResponse(data=card[10:])


@dataclass
class EmulatedWorker:
    """One instance with one domain, whose cache the test changes at will."""

    name: str
    role: "Role.ValueType"
    settings: ServiceSettings
    bus: Bus
    revision: str = REVISION
    kv_format: str = ""
    snapshots_hang: bool = False
    snapshots_asked: int = 0
    epoch: int = 1
    reports: int = 0
    mirror: BlockMirror = field(default_factory=BlockMirror)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    endpoint: str = ""

    async def start(self) -> None:
        self.membership = Membership(self.settings)
        await self.membership.start()
        self.stack.push_async_callback(self.membership.close)
        servicer = Servicer(
            add_WorkerServiceServicer_to_server, EmulatedWorkerServicer(self), "tidemill.mesh.v1.WorkerService"
        )
        server = await self.stack.enter_async_context(serve_grpc(self.settings, [servicer]))
        self.endpoint = server.endpoint
        self.new_sequencer()
        self.registration: Registration = await self.membership.register(self.record())
        beats = asyncio.create_task(self._beat())
        self.stack.callback(beats.cancel)

    @property
    def tier(self) -> int:
        return TIER_L3 if self.role == ROLE_KVSTORE else TIER_L1

    @property
    def domain(self) -> DomainRef:
        incarnation = self.membership.incarnation
        epoch = incarnation if self.role == ROLE_KVSTORE else f"e{self.epoch}"
        return DomainRef(instance=self.name, incarnation=incarnation, domain=0, epoch=epoch)

    @property
    def card(self) -> bytes:
        card = ModelCard(name="m", revision=self.revision, block_size=BLOCK, kv_bytes_per_token=1000)
        return card.SerializeToString(deterministic=True)

    def record(self) -> MembershipRecord:
        digest = hashlib.sha256(self.card).hexdigest()
        worker = self.role != ROLE_KVSTORE
        return MembershipRecord(
            instance=self.name,
            incarnation=self.membership.incarnation,
            role=self.role,
            endpoint=self.endpoint,
            domains=[DomainRecord(domain=0, epoch=f"e{self.epoch}", num_blocks=1000)] if worker else [],
            models=[ModelRef(name="m", revision=self.revision, card_digest=digest, kv_format=self.kv_format)]
            if worker
            else [],
        )

    def new_sequencer(self) -> None:
        self.sequencer = EventSequencer(self.domain, self.revision, time.monotonic)

    def publish(self, *events: KvEvent, lose: bool = False) -> None:
        """Applies events to the cache and announces them, unless the message gets lost."""
        for event in events:
            self.mirror.apply(event)
        batch = self.sequencer.batch(events)
        assert batch is not None
        if not lose:
            self.bus.publish(kv_subject(self.settings.mesh, self.name), batch.SerializeToString())

    def store(self, hashes: list[bytes], *, lose: bool = False) -> None:
        self.publish(stored_event(b"", hashes, self.tier), lose=lose)

    def remove(self, hashes: list[bytes], *, lose: bool = False) -> None:
        self.publish(removed_event(hashes, self.tier), lose=lose)

    def clear(self) -> None:
        self.publish(cleared_event())

    async def restart_domain(self) -> None:
        """The rank came back with an empty cache."""
        self.epoch += 1
        self.mirror = BlockMirror()
        self.new_sequencer()
        await self.registration.update(self.record())

    def report(self, **load: Any) -> None:
        """Sends a load report."""
        self.reports += 1
        values = {"total_blocks": 1000, "available_blocks": 1000, "prefill_tokens_per_s": 1000.0, **load}
        report = LoadReport(domain=self.domain, sequence=self.reports, **values)
        self.bus.publish(load_subject(self.settings.mesh, self.name), report.SerializeToString())

    async def stop(self) -> None:
        await self.registration.deregister()
        await self.stack.aclose()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            batch = self.sequencer.heartbeat()
            if batch is not None:
                self.bus.publish(kv_subject(self.settings.mesh, self.name), batch.SerializeToString())


def spawn(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(argv, stdout=output, stderr=output)


@dataclass
class RouterMesh:
    """A router process and its surroundings."""

    servers: Servers
    settings: ServiceSettings
    bus: Bus
    folder: Path
    stack: contextlib.AsyncExitStack
    process: subprocess.Popen[bytes] | None = None

    async def start_router(self, *flags: str) -> None:
        self.process, self.ports = await self._start("router-t", *flags)
        self.channel = grpc.aio.insecure_channel(self.ports["endpoint"])
        self.stub = RouterServiceStub(self.channel)

    async def add_replica(self, name: str, *flags: str) -> "RouterMesh":
        """Another router of the same mesh, which lives until the test ends."""
        replica = RouterMesh(self.servers, self.settings, self.bus, self.folder, self.stack)
        replica.process, replica.ports = await replica._start(name, *flags)
        replica.channel = grpc.aio.insecure_channel(replica.ports["endpoint"])
        replica.stub = RouterServiceStub(replica.channel)
        self.stack.push_async_callback(replica.kill_router)
        return replica

    async def _start(self, name: str, *flags: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        run_file, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        run_file.unlink(missing_ok=True)
        settings = self.settings
        argv = [sys.executable, "-m", "tidemill_router", f"--instance={name}", f"--mesh={settings.mesh}"]
        argv += [f"--etcd={settings.etcd}", f"--nats={settings.nats}", f"--liveness-s={settings.liveness_s}"]
        argv += [f"--run-dir={self.folder}", *flags]
        process = await asyncio.to_thread(spawn, argv, log)
        while not run_file.exists():
            assert process.poll() is None, log.read_text()[-4000:]
            await asyncio.sleep(0.02)
        return process, json.loads(run_file.read_text())

    async def kill_router(self) -> None:
        assert self.process is not None
        await self.channel.close()
        self.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)

    async def add(self, name: str, role: "Role.ValueType", **more: Any) -> EmulatedWorker:
        worker = EmulatedWorker(name, role, self.settings, self.bus, **more)
        await worker.start()
        self.stack.push_async_callback(worker.stack.aclose)
        worker.report()
        return worker

    async def add_gateway(self, name: str) -> tuple[InstanceRef, Registration]:
        membership = Membership(self.settings)
        await membership.start()
        self.stack.push_async_callback(membership.close)
        record = MembershipRecord(instance=name, incarnation=membership.incarnation, role=ROLE_GATEWAY, endpoint="x:1")
        registration = await membership.register(record)
        return InstanceRef(instance=name, incarnation=membership.incarnation), registration

    async def place(self, hashes: list[bytes], tokens: int = 0, **more: Any) -> PlacePrefillResponse:
        values = {"request_id": "q", "gateway": GATEWAY, "model_revision": REVISION, "max_tokens": 16, **more}
        tokens = tokens or len(hashes) * BLOCK + 20
        request = PlacePrefillRequest(prompt_tokens=tokens, block_hashes=join_hashes(hashes), **values)
        return await self.stub.PlacePrefill(request)

    async def glance(self, hashes: list[bytes], **more: Any) -> PlacePrefillResponse:
        """A placement that is cancelled at once."""
        placed = await self.place(hashes, **more)
        await self.report(Report(reservation_id=placed.reservation_id, kind=Report.KIND_CANCELLED))
        return placed

    async def place_decode(self, hashes: list[bytes], **more: Any) -> PlaceDecodeResponse:
        values = {"request_id": "q", "gateway": GATEWAY, "model_revision": REVISION, "max_tokens": 16, **more}
        tokens = len(hashes) * BLOCK + 20
        request = PlaceDecodeRequest(context_tokens=tokens, block_hashes=join_hashes(hashes), **values)
        return await self.stub.PlaceDecode(request)

    async def report(self, *reports: Report, gateway: InstanceRef = GATEWAY) -> ReportResponse:
        return await self.stub.Report(ReportRequest(gateway=gateway, reports=reports))

    async def status(self) -> GetRouterStatusResponse:
        return await self.stub.GetRouterStatus(GetRouterStatusRequest())

    async def instance(self, name: str) -> InstanceView:
        """The router's view of an instance, once it has one."""
        while True:
            for view in (await self.status()).instances:
                if view.domain.instance == name:
                    return view
            await asyncio.sleep(0.02)

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits; the test's timeout is the limit."""
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)

    async def until_indexed(self, *workers: EmulatedWorker) -> None:
        """Waits until the router's index has as many blocks of each worker as that has itself."""
        for worker in workers:
            while True:
                view = await self.instance(worker.name)
                indexed = view.index_blocks == len(worker.mirror)
                if view.load_age_s >= 1e6:
                    # The one at its start came before the router knew the instance.
                    worker.report()
                elif indexed and view.event_sequence == worker.sequencer.sequence:
                    break
                await asyncio.sleep(0.02)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    started = Servers.start(tmp_path_factory.mktemp("servers"))
    yield started
    started.stop()


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[Servers]:
    started = Servers.start(tmp_path / "servers")
    yield started
    started.stop()


@pytest.fixture
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RouterMesh]:
    """A router on the session's servers, or on the test's own if it asks for those."""
    own = "own_servers" in request.fixturenames
    chosen: Servers = request.getfixturevalue("own_servers" if own else "servers")
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:50]
    settings = ServiceSettings(
        mesh=name,
        etcd=f"127.0.0.1:{chosen.etcd_port}",
        nats=f"nats://127.0.0.1:{chosen.nats_port}",
        liveness_s=LIVENESS_S,
    )
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, "test", Metrics("test", "test"))
        stack.push_async_callback(bus.close)
        started = RouterMesh(chosen, settings, bus, tmp_path, stack)
        try:
            yield started
        finally:
            if started.process is not None and started.process.poll() is None:
                await started.kill_router()
