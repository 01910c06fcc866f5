"""One link for each incarnation of each worker, following the membership."""

import asyncio
from collections.abc import Callable
from functools import partial

from tidemill.mesh.v1.common_pb2 import InstanceRef, Target
from tidemill.mesh.v1.membership_pb2 import MembershipRecord
from tidemill_gateway.flow.leg import Leg
from tidemill_gateway.flow.worker_link import WorkerLink
from tidemill_gateway.models.fleet import is_worker
from tidemill_mesh.channels import Channels
from tidemill_mesh.membership import InstanceView
from tidemill_mesh.tasks import end, spawn

CONNECT_RPC = "tidemill.mesh.v1.WorkerService/Connect"
SWEEP_S = 1.0

Incarnation = tuple[str, str]


class WorkerLinks:
    """Opens a link when a worker appears; closes it when its incarnation is gone and nothing runs on it."""

    def __init__(
        self,
        instances: InstanceView,
        channels: Channels,
        gateway: Callable[[], InstanceRef],
        liveness_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._instances = instances
        self._channels = channels
        self._gateway = gateway
        self._liveness_s = liveness_s
        self._clock = clock
        self._links: dict[Incarnation, WorkerLink] = {}
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follows the membership until cancelled, then ends all streams."""
        stop = self._instances.subscribe(self._on_change)
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                self._sweep()
        finally:
            stop()
            await asyncio.gather(*map(end, self._tasks.values()))

    def to(self, target: Target) -> WorkerLink:
        """The link to a placement's target; made for it when the membership does not show it yet."""
        domain = target.domain
        link = self._links.get((domain.instance, domain.incarnation))
        return link or self._link(domain.instance, domain.incarnation, target.endpoint)

    def all(self) -> list[WorkerLink]:
        """Every link, of any state."""
        return list(self._links.values())

    def get(self, instance: str, incarnation: str) -> WorkerLink | None:
        """A link that exists."""
        return self._links.get((instance, incarnation))

    def domain_progress_at(self, leg: Leg) -> float:
        """When the leg's domain last gave this gateway anything."""
        domain = leg.target.domain
        link = self._links.get((domain.instance, domain.incarnation))
        return 0.0 if link is None else link.progress_at.get(domain.domain, 0.0)

    def _on_change(self, old: MembershipRecord | None, new: MembershipRecord | None) -> None:
        if new is not None and is_worker(new):
            self._link(new.instance, new.incarnation, new.endpoint, new.stream_endpoint)

    def _link(self, instance: str, incarnation: str, endpoint: str, stream_endpoint: str = "") -> WorkerLink:
        key = (instance, incarnation)
        link = self._links.get(key)
        if link is None:
            peer = InstanceRef(instance=instance, incarnation=incarnation)
            dial = partial(self._channels.open_stream, CONNECT_RPC, (stream_endpoint, endpoint))
            link = WorkerLink(peer, endpoint, self._gateway, dial, self._liveness_s, self._clock)
            self._links[key] = link
            self._tasks[key] = spawn(link.run(), f"link to {instance}")
        return link

    def _sweep(self) -> None:
        """Closes links whose incarnation the membership does not show (any more) and that carry nothing."""
        known = {(r.instance, r.incarnation) for r in self._instances.records.values()}
        for key, link in list(self._links.items()):
            if key not in known and not link.legs:
                self._tasks.pop(key).cancel()
                del self._links[key]
                if not any(other.endpoint == link.endpoint for other in self._links.values()):
                    self._channels.forget(link.endpoint)
