"""Greedy streams through gateways while something breaks, and what must be true of each of them afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from harness.running import RunningCluster
from harness.streams import Stream

from tidemill.client import Client
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill.v1.errors_pb2 import ErrorCode
from tidemill_local import health

POLL_S = 0.005
PATIENCE_S = 180.0


class EndedBefore(AssertionError):
    """All streams had ended before the fault could be made."""


class Wave:
    """Streams that start together; leaving the block waits until all have ended, within deadline + 2 x liveness."""

    def __init__(
        self,
        cluster: RunningCluster,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        *,
        gateways: Sequence[str] = ("gateway-1",),
        timeout_s: float = 300.0,
    ) -> None:
        self._cluster = cluster
        self._bound_s = timeout_s + 2 * float(cluster.spec.settings["all"]["liveness_s"])
        self.streams = [
            Stream(gateways[i % len(gateways)], prompt, tokens, timeout_s)
            for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Self:
        self._clients = {name: self._cluster.client(name) for name in {stream.gateway for stream in self.streams}}
        model = self._cluster.model
        self._tasks = [asyncio.create_task(s.run(self._clients[s.gateway], model)) for s in self.streams]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for task in self._tasks:
                task.cancel()
        done, late = await asyncio.wait(self._tasks, timeout=self._bound_s)
        for client in self._clients.values():
            await client.close()
        if error is None:
            assert not late, f"{len(late)} streams have not ended {self._bound_s:.0f} s after the last event"
            for task in done:
                task.result()
            for stream in self.streams:
                assert stream.took_s <= self._bound_s

    async def until_tokens(self, total: int, *, each: int = 0) -> None:
        """Waits until so many tokens have come in all, and by each stream; some stream must still run then."""
        while sum(len(s.tokens) for s in self.streams) < total or any(len(s.tokens) < each for s in self.streams):
            self._check_running()
            await asyncio.sleep(POLL_S)
        self._check_running()

    def _check_running(self) -> None:
        if all(stream.ended for stream in self.streams):
            raise EndedBefore("ended before the fault")

    def of(self, gateway: str) -> list[Stream]:
        """The streams through one gateway."""
        return [stream for stream in self.streams if stream.gateway == gateway]

    def check_cut(self, streams: Sequence[Stream], *codes: "ErrorCode.ValueType") -> None:
        """These were cut by a fault, unless they had ended before it, as one or the other may have."""
        assert any(stream.error for stream in streams), "the fault met no request"
        for stream in streams:
            stream.check_cut(*codes) if stream.error else stream.check_whole()

    def check_whole(self) -> None:
        """Every stream is whole."""
        for stream in self.streams:
            stream.check_whole()


MakeWave = Callable[..., Wave]


async def run_whole(wave: Wave) -> None:
    """A wave that nothing disturbs any more."""
    async with wave:
        pass
    wave.check_whole()


async def busiest(cluster: RunningCluster, role: "Role.ValueType") -> str:
    """The instance of a role with the most requests now: a fault there meets some."""
    members = (await cluster.look()).with_role(role)
    return max(members, key=lambda member: member.holds["requests"]).record.instance


async def requests_at(cluster: RunningCluster, instance: str) -> int:
    """How many an instance has now; 0 if it does not say."""
    member = (await cluster.look()).members.get(instance)
    return member.holds.get("requests", 0) if member else 0


@asynccontextmanager
async def worker_fault(make: MakeWave, cluster: RunningCluster, role: str, victim: str = "") -> AsyncIterator[str]:
    """Load, and an instance of the role that has work, the victim or else the busiest, for the block to end.

    Afterwards all is as if it had not.
    """
    # Prefill is caught while most prompts are yet to be computed, on a quick machine too, decode while its streams run.
    streams, output_tokens = (72, 30) if role == "prefill" else (16, 600)
    async with make(streams=streams, output_tokens=output_tokens) as disturbed:
        await disturbed.until_tokens(1)
        while victim and not await requests_at(cluster, victim):
            await disturbed.until_tokens(1)
        yield victim or await busiest(cluster, Role.Value(f"ROLE_{role.upper()}"))
    disturbed.check_whole()
    assert any(stream.attempts > 1 for stream in disturbed.streams), "the fault met no request"


async def whole_again(cluster: RunningCluster, make: MakeWave) -> None:
    """All instances answer, requests are served, and nothing is held afterwards."""
    await cluster.until_members(*(name for _, name in cluster.spec.instances()), within_s=PATIENCE_S)
    await run_whole(make(streams=4, output_tokens=20))
    # What a frozen process left half done ends with the longest of all deadlines, that of a KV message (30 s).
    await cluster.holds_are_zero(within_s=PATIENCE_S)


async def until_all_are_routable(cluster: RunningCluster, *added: str) -> None:
    """Waits until every worker of the cluster, and those added to it, may be given requests: all their ranks are up."""
    workers = {name for service, name in cluster.spec.instances() if service in ("prefill", "decode")} | {*added}
    for service, router in cluster.spec.instances():
        if service == "router":
            record, endpoint = cluster.cluster.record(router), cluster.cluster.endpoint(router)
            await asyncio.to_thread(health.wait_for_router, record, endpoint, workers, PATIENCE_S)
