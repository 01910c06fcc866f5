import asyncio

import pytest

from tidemill.v1 import errors_pb2
from tidemill_gateway.admission import Admission, AdmissionLimits
from tidemill_mesh.errors import MeshError


def admission(**limits) -> Admission:
    return Admission(AdmissionLimits(**({"running": 1, "queued": 2, "per_tenant": 0, "queue_wait_s": 10.0} | limits)))


class Job:
    """A request that runs until it is told to end."""

    def __init__(self, gate: Admission, request_id: str, tenant: str = "t") -> None:
        self.inside = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, request_id, tenant))

    async def _run(self, gate: Admission, request_id: str, tenant: str) -> None:
        async with gate.admit(request_id, tenant):
            self.inside.set()
            await self.end.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def assert_empty(gate: Admission) -> None:
    assert (gate.running, gate.queued, gate.live_ids) == (0, 0, set())


async def refusal(gate: Admission, request_id: str, tenant: str = "t") -> "errors_pb2.ErrorCode":
    with pytest.raises(MeshError) as caught:
        async with gate.admit(request_id, tenant):
            pass
    return caught.value.code


async def test_places_go_to_waiters_in_order():
    gate = admission()
    first, second, third = Job(gate, "1"), Job(gate, "2"), Job(gate, "3")
    await settle()
    assert (gate.running, gate.queued) == (1, 2)
    first.end.set()
    await settle()
    assert second.inside.is_set()
    assert not third.inside.is_set()
    for job in (second, third):
        job.end.set()
    await asyncio.gather(first.task, second.task, third.task)
    assert_empty(gate)


async def test_a_full_queue_refuses_at_once_with_a_time_to_retry():
    gate = admission(queued=0)
    running = Job(gate, "1")
    await settle()
    with pytest.raises(MeshError) as caught:
        async with gate.admit("2", "t"):
            pass
    assert caught.value.code == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s > 0
    running.end.set()
    await running.task
    assert_empty(gate)


async def test_waiting_is_bounded():
    gate = admission(queue_wait_s=0.01)
    running = Job(gate, "1")
    await settle()
    assert await refusal(gate, "2") == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    running.end.set()
    await running.task
    assert_empty(gate)


async def test_a_waiter_that_is_cancelled_gives_its_turn_on():
    gate = admission()
    first, second, third = Job(gate, "1"), Job(gate, "2"), Job(gate, "3")
    await settle()
    first.end.set()
    second.task.cancel()
    await settle()
    assert third.inside.is_set()
    third.end.set()
    await asyncio.gather(first.task, second.task, third.task, return_exceptions=True)
    assert_empty(gate)


async def test_a_live_id_is_refused_and_a_spent_one_is_free():
    gate = admission(running=5)
    running = Job(gate, "same")
    await settle()
    assert await refusal(gate, "same") == errors_pb2.ERROR_CODE_ALREADY_EXISTS
    running.end.set()
    await running.task
    async with gate.admit("same", "t"):
        pass


async def test_a_tenant_cannot_take_all_places():
    gate = admission(running=5, per_tenant=1)
    running = Job(gate, "1", "greedy")
    await settle()
    assert await refusal(gate, "2", "greedy") == errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    async with gate.admit("3", "other"):
        pass
    running.end.set()
    await running.task


async def test_a_drain_refuses_new_work_and_waits_for_the_old():
    gate = admission()
    running = Job(gate, "1")
    await settle()
    gate.drain()
    assert await refusal(gate, "2") == errors_pb2.ERROR_CODE_UNAVAILABLE
    waiting = asyncio.create_task(gate.wait_idle())
    await settle()
    assert not waiting.done()
    running.end.set()
    await waiting
    await running.task
