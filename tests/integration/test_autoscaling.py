"""The autoscaler with real workers: out under load, back in without it, one leader, and nothing lost on the way."""

import asyncio
import signal
import time
from collections.abc import Callable

import pytest
from harness.running import RunningCluster

from tidemill.mesh.v1.membership_pb2 import Role
from tidemill_local import processes
from tidemill_local.mesh_view import MeshView

# Quick, but of the same proportions as the defaults.
QUICK = {
    "tick_s": 0.2,
    "window_s": 1.0,
    "scale_in_after_s": 3.0,
    "cooldown_s": 2.0,
    "warmup_s": 1.0,
    "settle_s": 2.0,
    # A leader that is not run for seconds goes on to lead; a slow machine takes minutes to start a worker.
    "liveness_s": 3.0,
    "start_timeout_s": 600.0,
}
# A target that any decoding misses: the SLO load is high while something runs.
HARD_TARGET = {"slo_tpot_s": 0.0001}
PATIENCE_S = 400.0


async def until(cluster: RunningCluster, what: str, reached: Callable[[MeshView], bool]) -> MeshView:
    """Looks until the mesh is in a state."""
    end = time.monotonic() + PATIENCE_S
    while True:
        view = await cluster.look()
        if reached(view):
            return view
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s; members {sorted(view.members)}"
        await asyncio.sleep(0.2)


def serving(view: MeshView, role: "Role.ValueType") -> set[str]:
    """Instances of a role that take requests."""
    return {m.record.instance for m in view.with_role(role) if not m.record.draining}


def decodes(view: MeshView) -> set[str]:
    """Decode instances that take requests."""
    return serving(view, Role.ROLE_DECODE)


def started_by_autoscaler(view: MeshView) -> set[str]:
    return {instance for instance in view.members if "-auto-" in instance}


def leader(view: MeshView) -> str:
    """The autoscaler that says that it leads; empty if none does."""
    found = [m.record.instance for m in view.with_role(Role.ROLE_AUTOSCALER) if m.status and m.status.leader]
    assert len(found) <= 1, found
    return found[0] if found else ""


async def test_one_more_under_load_and_one_less_without_it_even_if_the_autoscaler_dies_between(start_cluster):
    cluster = start_cluster(kvstores=0, spare_workers=1, settings={"autoscaler": QUICK, "decode": HARD_TARGET})
    busy = True

    async def load(index: int) -> int:
        served = 0
        async with cluster.client() as client:
            while busy:
                answer = await client.complete(
                    model=cluster.model, text=f"{index}-{served}", max_tokens=60, ignore_eos=True
                )
                assert answer.usage.completion_tokens == 60
                served += 1
        return served

    async with asyncio.TaskGroup() as group:
        loads = [group.create_task(load(i)) for i in range(3)]
        grown = await until(cluster, "one more decode instance", lambda view: len(decodes(view)) == 2)
        [added] = started_by_autoscaler(grown)
        record = cluster.cluster.record(added)
        cluster.kill("autoscaler-1")
        cluster.restart("autoscaler-1")
        busy = False
    assert all(task.result() > 0 for task in loads)

    shrunk = await until(cluster, "back to one", lambda view: not started_by_autoscaler(view))
    assert decodes(shrunk) == {"decode-1"}
    assert await asyncio.to_thread(processes.wait_gone, record, PATIENCE_S)
    await cluster.holds_are_zero()


async def test_a_leader_that_was_frozen_steps_down_and_does_not_start_what_its_successor_has_started(start_cluster):
    cluster = start_cluster(kvstores=0, autoscalers=2, settings={"autoscaler": QUICK})
    first = leader(await until(cluster, "a leader", leader))
    cluster.kill(first, signal.SIGSTOP)
    [second] = {"autoscaler-1", "autoscaler-2"} - {first}
    cluster.kill("decode-1")

    def replaced(view: MeshView) -> bool:
        return len(started_by_autoscaler(view)) == 1 and view.members[second].status.leader

    await until(cluster, "the second leads and has filled up to the minimum", replaced)
    cluster.kill(first, signal.SIGCONT)
    after = await until(
        cluster, "the first answers again", lambda view: first in view.members and not view.members[first].problem
    )
    assert leader(after) == second
    # Long enough for several of its ticks and for its lease to be granted again.
    await asyncio.sleep(3.0)
    settled = await cluster.look()
    assert leader(settled) == second
    assert len(decodes(settled)) == 1
    assert [record.name for record in cluster.cluster.running() if "-auto-" in record.name] == sorted(
        started_by_autoscaler(settled)
    )


@pytest.mark.full
async def test_prefill_grows_serves_and_shrinks_too(start_cluster):
    # Any queue misses the target, and decode does not help out.
    settings = {"autoscaler": QUICK, "prefill": {"slo_ttft_s": 0.001}, "router": {"local_prefill_load": 0}}
    cluster = start_cluster(kvstores=0, spare_workers=1, settings=settings)
    busy, served_by = True, set()

    async def load(index: int) -> None:
        number = 0
        async with cluster.client() as client:
            while busy:
                # A new prompt each time, too long for decode to compute itself.
                text = f"{index}-{number} " + "So long. " * 40
                answer = await client.complete(model=cluster.model, text=text, max_tokens=2, include_placement=True)
                served_by.add(answer.placement.prefill_instance)
                number += 1

    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(load(index))
        grown = await until(
            cluster, "one more prefill instance", lambda view: len(serving(view, Role.ROLE_PREFILL)) == 2
        )
        [added] = started_by_autoscaler(grown)
        record = cluster.cluster.record(added)
        await until(cluster, "it has served", lambda _: added in served_by)
        busy = False

    shrunk = await until(cluster, "back to one", lambda view: not started_by_autoscaler(view))
    assert serving(shrunk, Role.ROLE_PREFILL) == {"prefill-1"}
    assert await asyncio.to_thread(processes.wait_gone, record, PATIENCE_S)
    await cluster.holds_are_zero()
