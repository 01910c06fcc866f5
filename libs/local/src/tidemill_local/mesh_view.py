"""The mesh as an operator sees it: members from etcd, and what each says of itself by gRPC."""

import asyncio
import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from tidemill.mesh.v1 import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill_local.spec import Addresses
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership import InstanceView

RPC_TIMEOUT_S = 5.0
VIEW_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Member:
    """One registered instance and its own answer; `status` is None where the role has none or it did not answer."""

    record: MembershipRecord
    status: Any = None
    problem: str = ""

    @property
    def holds(self) -> Mapping[str, int]:
        """What it holds now, by kind."""
        return getattr(self.status, "holds", {})


@dataclass(frozen=True)
class MeshView:
    """All members, by instance."""

    members: dict[str, Member] = field(default_factory=dict)

    def with_role(self, *roles: "Role.ValueType") -> list[Member]:
        """Members of these roles."""
        return [member for member in self.members.values() if member.record.role in roles]

    def held(self) -> dict[str, int]:
        """All holds that are not zero, as "instance.kind"."""
        return {
            f"{name}.{kind}": count
            for name, member in self.members.items()
            for kind, count in member.holds.items()
            if count
        }


async def look(addresses: Addresses, *, mesh: str = "default") -> MeshView:
    """Reads the members from etcd and asks each for its status; TimeoutError if etcd does not answer."""
    settings = ServiceSettings(instance="tidemill-cli", etcd=addresses.etcd, nats=addresses.nats, mesh=mesh)
    view = InstanceView(settings)
    await view.start()
    try:
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            await view.synced.wait()
    except TimeoutError:
        raise TimeoutError(f"etcd at {addresses.etcd} does not answer within {VIEW_TIMEOUT_S:.0f} s") from None
    else:
        records = dict(view.records)
    finally:
        await view.close()
    members = await asyncio.gather(*(ask_member(record) for record in records.values()))
    return MeshView({member.record.instance: member for member in sorted(members, key=member_order)})


def member_order(member: Member) -> tuple[int, str]:
    """Gateways first, then in the order of a request's life."""
    return int(member.record.role), member.record.instance


async def ask_member(record: MembershipRecord) -> Member:
    """One member with its answer, or why there is none."""
    try:
        if record.role == Role.ROLE_GATEWAY:
            return Member(record, await asyncio.to_thread(gateway_status, record.http_endpoint))
        async with grpc.aio.insecure_channel(record.endpoint) as channel:
            return Member(record, await status_of(record.role, channel))
    except grpc.aio.AioRpcError as error:
        return Member(record, problem=f"{error.code().name}: {error.details()}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Member(record, problem=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class GatewayStatus:
    """A gateway has no status call of its own in the mesh; it tells its holds by HTTP."""

    holds: Mapping[str, int]
    degraded: tuple[str, ...] = ()
    """Steps of degraded service that are on, as its metrics tell."""


def gateway_status(endpoint: str) -> GatewayStatus:
    """What a gateway holds: its own list, which it shows to its machine only, else what its metrics tell.

    Raises ValueError where it shows neither: nothing is known of its holds then, which is not the same as none.
    """
    connection = http.client.HTTPConnection(endpoint, timeout=RPC_TIMEOUT_S)
    try:
        told = get(connection, "/debug/holds")
        exposition = get(connection, "/metrics") or ""
    finally:
        connection.close()
    holds = json.loads(told) if told is not None else held_of(exposition)
    if not holds:
        raise ValueError("it does not tell its holds from here")
    return GatewayStatus(holds, degraded_steps(exposition))


def get(connection: http.client.HTTPConnection, path: str) -> str | None:
    """The body of a page, None where there is none for us."""
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode()
    return body if response.status == http.client.OK else None


def held_of(exposition: str) -> dict[str, int]:
    """Of a gateway's metrics, what it holds by kind."""
    found = re.findall(r"^tidemill_gateway_held_(\w+) (\S+)$", exposition, re.MULTILINE)
    return {kind: int(float(count)) for kind, count in found}


def degraded_steps(exposition: str) -> tuple[str, ...]:
    """Of a gateway's metrics, the steps of degraded service that are on."""
    return tuple(re.findall(r'^tidemill_gateway_degraded\{step="(\w+)"\} [1-9]', exposition, re.MULTILINE))


async def status_of(role: "Role.ValueType", channel: grpc.aio.Channel) -> Any:
    """The answer of the role's own status call; None for a role that has none."""
    match role:
        case Role.ROLE_PREFILL | Role.ROLE_DECODE:
            worker = worker_pb2_grpc.WorkerServiceStub(channel)
            return await worker.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=RPC_TIMEOUT_S)
        case Role.ROLE_ROUTER:
            router = router_pb2_grpc.RouterServiceStub(channel)
            return await router.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=RPC_TIMEOUT_S)
        case Role.ROLE_KVSTORE:
            store = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            return await store.GetKvStoreStatus(kvstore_pb2.GetKvStoreStatusRequest(), timeout=RPC_TIMEOUT_S)
        case Role.ROLE_AUTOSCALER:
            scaler = autoscaler_pb2_grpc.AutoscalerServiceStub(channel)
            return await scaler.GetAutoscalerStatus(autoscaler_pb2.GetAutoscalerStatusRequest(), timeout=RPC_TIMEOUT_S)
    return None
