"""Tells other gateways what tenants use here, and hears what they use there."""

import asyncio
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.events_pb2 import TenantUse
from tidemill.mesh.v1.membership_pb2 import ROLE_GATEWAY
from tidemill_gateway.tenants.budgets import Budgets
from tidemill_mesh.bus import Bus
from tidemill_mesh.membership import InstanceView

INTERVAL_S = 0.2
SILENT_LIVENESS = 3.0

log = structlog.get_logger()


def use_subject(mesh: str, instance: str = "*") -> str:
    """NATS subject of a gateway's reports of use; "*": of all."""
    return f"tidemill.{mesh}.use.{instance}"


def gateway_share(instances: InstanceView, bus: Bus) -> float:
    """This gateway's part of a limit: all of it while gateways hear each other, else one of as many equal parts."""
    if bus.connected:
        return 1.0
    return 1.0 / max(1, sum(record.role == ROLE_GATEWAY for record in instances.records.values()))


class UseSharing:
    """Reports when something has changed, when gateways have come or gone, and each liveness_s."""

    def __init__(
        self,
        budgets: Budgets,
        bus: Bus,
        instances: InstanceView,
        mesh: str,
        gateway: Callable[[], InstanceRef],
        liveness_s: float,
    ) -> None:
        self._budgets = budgets
        self._bus = bus
        self._instances = instances
        self._mesh = mesh
        self._gateway = gateway
        self._liveness_s = liveness_s

    async def run(self) -> None:
        """Reports until cancelled."""
        subscription = await self._bus.subscribe(use_subject(self._mesh), self._on_message)
        said: list[object] = []
        told: list[tuple[str, str]] = []
        quiet_s = 0.0
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                quiet_s += INTERVAL_S
                counts = self._budgets.counts()
                records = self._instances.records.values()
                members = [(r.instance, r.incarnation) for r in records if r.role == ROLE_GATEWAY]
                if counts != said or members != told or quiet_s >= self._liveness_s:
                    said, told, quiet_s = list(counts), members, 0.0
                    self._report()
                    self._budgets.forget(SILENT_LIVENESS * self._liveness_s, members)
        finally:
            await subscription.unsubscribe()

    def _report(self) -> None:
        if not self._bus.connected:
            return  # What the bus kept for later would be heard as used just then.
        me, message = self._gateway(), self._budgets.report()
        message.gateway.CopyFrom(me)
        self._bus.publish(use_subject(self._mesh, me.instance), message.SerializeToString())

    def _on_message(self, subject: str, payload: bytes) -> None:
        try:
            use = TenantUse.FromString(payload)
        except DecodeError:
            log.warning("a report of use cannot be read", subject=subject)
            return
        sender, me = use.gateway, self._gateway()
        if sender.instance != me.instance:
            self._budgets.hear((sender.instance, sender.incarnation), use)
