"""A live request between its choices and its consumer."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.worker_pb2 import FINISH_LENGTH, Sampling
from tidemill_gateway.flow.effects import Bounds
from tidemill_gateway.flow.generation import Generation, Mesh
from tidemill_gateway.flow.plan import ChoicePlan, RequestPlan
from tidemill_gateway.flow.reservations import Reservations
from tidemill_mesh.errors import MeshError


class Placer:
    """Never answers, or fails in a way that no placer should."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.fault = fault

    async def prefill(self, *_: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def generation_of(placer: Placer):
    tasks: set[asyncio.Task[None]] = set()
    mesh = Mesh(
        links=None,  # type: ignore[arg-type]
        placer=placer,  # type: ignore[arg-type]
        reservations=Reservations(time.monotonic),
        gateway=InstanceRef,
        spawn=lambda work: tasks.add(asyncio.get_running_loop().create_task(work)),
        bounds=Bounds(1.0, 1.0),
        placement_wait_s=1.0,
        resume_wait_s=1.0,
        clock=time.monotonic,
    )
    choice = ChoicePlan(0, b"\0\0\0\0", 1, b"", Sampling(max_tokens=8))
    plan = RequestPlan(
        request_id="r", tenant="t", model_revision="m", choices=(choice,), deadline=time.monotonic() + 30
    )
    generation = Generation(plan, mesh, lambda: None)
    try:
        yield generation
    finally:
        generation.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("fault", [RuntimeError("odd"), asyncio.CancelledError()])
async def test_a_placement_that_fails_in_an_unforeseen_way_ends_its_request(fault):
    async with generation_of(Placer(fault)) as generation, asyncio.timeout(120):
        generation.start()
        with pytest.raises(MeshError, match="failed to place"):
            await generation.take()


async def test_what_one_step_gives_is_one_call_and_an_error_comes_after_it():
    async with generation_of(Placer()) as generation, asyncio.timeout(120):
        calls: list[int] = []
        generation.on_ready = lambda: calls.append(len(generation.take_ready()))
        generation.start()
        run = generation.runs[0]
        generation.deliver(run, [1], [], None)
        generation.deliver(run, [2, 3], [], FINISH_LENGTH)
        assert calls == []
        await asyncio.sleep(0)
        assert calls == [2]
        assert not generation.has_news
        generation.on_ready = None
        generation.deliver(run, [4], [], None)
        generation.abort(MeshError(1, "over"))
        assert [tokens.token_ids for tokens in generation.take_ready()] == [[4]]
        assert generation.has_news
        with pytest.raises(MeshError, match="over"):
            generation.take_ready()
