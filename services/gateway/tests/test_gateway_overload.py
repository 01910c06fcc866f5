"""Low classes are refused while the mesh is overloaded, and only then."""

import asyncio

import httpx2
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.v1 import errors_pb2
from tidemill_gateway.overload import Overload, best_of_roles
from tidemill_mesh.errors import MeshError
from tidemill_mesh.load import load_subject


class World:
    """Looks each quarter second."""

    def __init__(self, load: float = 4.0) -> None:
        self.now_s = 0.0
        self.changes: list[bool] = []
        self.refused: list[str] = []
        self.overload = Overload(load, 0, lambda: self.now_s, lambda: 20.0)
        self.overload.on_change = self.changes.append
        self.overload.on_refused = self.refused.append

    def see(self, seconds: float, *reports: LoadReport) -> None:
        for _ in range(round(seconds * 4)):
            self.now_s += 0.25
            self.overload.observe(reports)

    def refusal(self, priority: int) -> MeshError | None:
        try:
            self.overload.check(priority)
        except MeshError as error:
            return error
        return None


def report(role: str, load: float, *, running: int = 3, **fields: float) -> LoadReport:
    return LoadReport(role=role, slo_load=load, running_requests=running, **fields)  # type: ignore[arg-type]


def test_low_classes_wait_while_even_the_best_instance_is_far_behind() -> None:
    world = World()
    late = report("prefill", 5.0, predicted_ttft_s=10.0)
    world.see(3, late, report("prefill", 9.0), report("decode", 0.5))
    refused = world.refusal(-1)
    assert refused is not None
    assert (refused.code, refused.field) == (errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "priority")
    assert refused.retry_after_s == pytest.approx(8.0)
    assert world.refusal(0) is None
    world.see(6, report("prefill", 2.0), report("decode", 0.5))
    assert world.refusal(-1) is None
    assert (world.changes, world.refused) == ([True, False], ["shed_low"])


def test_one_instance_that_keeps_up_is_enough() -> None:
    world = World()
    world.see(60, report("prefill", 50.0), report("prefill", 0.9), report("decode", 50.0), report("decode", 1.5))
    assert world.refusal(-100) is None


def test_late_tokens_drain_with_the_requests_that_have_to_end() -> None:
    world = World()
    world.see(3, report("decode", 5.0), report("prefill", 0.1))
    refused = world.refusal(-1)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(16.0)


def test_what_idle_or_draining_instances_say_counts_for_nothing() -> None:
    world = World()
    world.see(60, report("decode", 50.0, running=0))
    assert world.refusal(-1) is None
    assert best_of_roles([LoadReport(role="decode", slo_load=9.0, running_requests=1, draining=True)]) == []


def test_silence_ends_it_and_zero_turns_it_off() -> None:
    world = World()
    world.see(3, report("decode", 5.0))
    assert world.refusal(-1)
    world.see(6)
    assert world.refusal(-1) is None
    never = World(load=0.0)
    never.see(60, report("decode", 500.0))
    assert never.refusal(-1) is None


LOADS = st.floats(min_value=0, max_value=20) | st.just(float("nan")) | st.just(float("inf"))


@given(st.lists(st.tuples(LOADS, LOADS, st.floats(0.25, 10)), max_size=40))
def test_whatever_is_reported_a_retry_is_bounded_and_normal_classes_pass(moments) -> None:
    world = World()
    for prefill, decode, seconds in moments:
        world.see(seconds, report("prefill", prefill, predicted_ttft_s=prefill), report("decode", decode))
        assert world.refusal(0) is None
        refused = world.refusal(-1)
        assert refused is None or 1.0 <= refused.retry_after_s <= 60.0
    world.see(6, report("prefill", 0.1), report("decode", 0.1))
    assert world.refusal(-1) is None


@pytest.mark.full
async def test_what_load_reports_say_refuses_low_classes_over_both_apis_until_they_say_otherwise(emulated_mesh) -> None:
    settings = emulated_mesh.settings
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "priority": -1}
    loads = {"prefill": 0.5, "decode": 9.0}

    bus = await nats.connect(settings.nats)

    async def tell() -> None:
        sequence = 0
        while True:
            sequence += 1
            for role, load in loads.items():
                domain = DomainRef(instance=f"{role}-told", incarnation="i", epoch="e")
                told = report(role, load)
                told.domain.CopyFrom(domain)
                told.sequence = sequence
                await bus.publish(load_subject(settings.mesh, domain.instance), told.SerializeToString())
            await asyncio.sleep(0.2)

    teller = asyncio.create_task(tell())
    async with httpx2.AsyncClient(timeout=120) as http, Client(emulated_mesh.grpc_endpoint) as client:

        async def until(status: int) -> httpx2.Response:
            async with asyncio.timeout(300):
                while (
                    answer := await http.post(f"{emulated_mesh.http}/v1/completions", json=body)
                ).status_code != status:
                    await asyncio.sleep(0.1)
            return answer

        refused = await until(429)
        assert refused.json()["error"]["param"] == "priority"
        assert float(refused.headers["retry-after"]) >= 1
        with pytest.raises(TidemillError) as error:
            async for _ in client.generate(model="tiny", text="x", max_tokens=2, priority=-1):
                pass
        assert error.value.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
        assert error.value.retry_after_s >= 1.0
        usual = await http.post(f"{emulated_mesh.http}/v1/completions", json=body | {"priority": 0})
        assert usual.status_code == 200
        shown = (await http.get(f"{emulated_mesh.http}/metrics")).text
        assert 'tidemill_gateway_degraded{step="shed_low"} 1.0' in shown
        assert 'tidemill_gateway_shed_requests_total{step="shed_low"} 2.0' in shown
        loads["decode"] = 0.5
        await until(200)
        assert (
            'tidemill_gateway_degraded{step="shed_low"} 0.0' in (await http.get(f"{emulated_mesh.http}/metrics")).text
        )
    teller.cancel()
    await asyncio.gather(teller, return_exceptions=True)
    await bus.close()
