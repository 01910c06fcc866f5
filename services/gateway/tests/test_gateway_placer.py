"""How long a router that does not answer is avoided."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tidemill.mesh.v1.membership_pb2 import ROLE_ROUTER, MembershipRecord
from tidemill.mesh.v1.router_pb2 import PlacePrefillRequest
from tidemill_gateway.flow.placement import FIRST_PENALTY_S, MAX_DOUBLINGS, Placer
from tidemill_gateway.flow.router_client import RouterAway
from tidemill_mesh.errors import MeshError

ROUTER = MembershipRecord(role=ROLE_ROUTER, instance="r", incarnation="r-1")


class SilentRouter:
    """Fails all that were asked together at once."""

    def __init__(self) -> None:
        self.asked = 0
        self.gone = asyncio.Event()

    async def place_prefill(self, router: MembershipRecord, request: PlacePrefillRequest, wait_s: float) -> None:
        self.asked += 1
        await self.gone.wait()
        raise RouterAway("it is silent")


def placer_of(client: SilentRouter, now: list[float], *routers: MembershipRecord) -> Placer:
    instances = SimpleNamespace(records={router.instance: router for router in routers})
    links = SimpleNamespace()
    return Placer(instances, client, links, 2.0, lambda: now[0])  # type: ignore[arg-type]


async def ask(placer: Placer) -> Any:
    """No worker is there either, which has a name."""
    with pytest.raises(MeshError, match="no instance serves the model now"):
        await placer.prefill(PlacePrefillRequest(), 0.0, lambda: True)


async def test_a_thousand_that_fail_together_are_one_failure() -> None:
    client, now = SilentRouter(), [0.0]
    placer = placer_of(client, now, ROUTER)
    asking = [asyncio.create_task(ask(placer)) for _ in range(1100)]
    while client.asked < 1100:
        await asyncio.sleep(0)
    client.gone.set()
    await asyncio.gather(*asking)
    assert placer.router() is None
    now[0] = FIRST_PENALTY_S + 0.01
    assert placer.router() == ROUTER


async def test_a_router_that_stays_silent_for_hours_is_tried_now_and_then() -> None:
    client, now = SilentRouter(), [0.0]
    client.gone.set()
    placer = placer_of(client, now, ROUTER)
    for _ in range(1200):
        await ask(placer)
        now[0] += FIRST_PENALTY_S * 2**MAX_DOUBLINGS + 0.01
    assert client.asked == 1200


async def test_that_no_router_is_registered_is_logged_once() -> None:
    placer = placer_of(SilentRouter(), [0.0])
    with capture_logs() as logged:
        for _ in range(3):
            await ask(placer)
    assert [line["event"] for line in logged] == ["the router does not answer: placing without it"]
