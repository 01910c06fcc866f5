"""Greedy streams through gateways while something breaks, and what must be true of each of them afterwards."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from harness.running import RunningCluster

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.mesh.v1.membership_pb2 import Role
from tidemill.v1.errors_pb2 import ErrorCode
from tidemill.v1.inference_pb2 import FINISH_REASON_LENGTH

POLL_S = 0.005
PATIENCE_S = 60.0


@dataclass
class Stream:
    """One request as its caller sees it."""

    gateway: str
    prompt: Sequence[int]
    expected: Sequence[int]
    timeout_s: float
    tokens: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    attempts: int = 0
    charged: int = 0
    error: TidemillError | None = None
    took_s: float = 0.0
    ended: bool = False

    async def run(self, client: Client, model: str) -> None:
        """Reads it to its end, of whatever kind."""
        began_at = time.monotonic()
        try:
            async for response in client.generate(
                model=model,
                token_ids=self.prompt,
                max_tokens=len(self.expected),
                temperature=0.0,
                ignore_eos=True,
                timeout_s=self.timeout_s,
                include_placement=True,
            ):
                for delta in response.choices:
                    self.tokens += delta.token_ids
                    if delta.finish_reason:
                        self.finishes.append(delta.finish_reason)
                if response.HasField("usage"):
                    self.attempts = response.placement.attempts
                    self.charged = response.usage.completion_tokens
        except TidemillError as error:
            self.error = error
        finally:
            self.took_s = time.monotonic() - began_at
            self.ended = True

    def check_whole(self) -> None:
        """It ended once, with exactly the tokens of an undisturbed run, charged once."""
        assert self.error is None, f"after {len(self.tokens)} tokens and {self.took_s:.1f} s: {self.error}"
        assert self.tokens == list(self.expected)
        assert self.finishes == [FINISH_REASON_LENGTH]
        assert self.charged == len(self.expected)

    def check_cut(self, *codes: "ErrorCode.ValueType") -> None:
        """It ended with one of these errors, and what came before it was right."""
        assert self.error is not None
        assert self.error.code in codes, self.error
        assert self.tokens == list(self.expected[: len(self.tokens)])
        assert self.finishes == []


class Wave:
    """Streams that start together; leaving the block waits until all have ended, within deadline + 2 x liveness."""

    def __init__(
        self,
        cluster: RunningCluster,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        *,
        gateways: Sequence[str] = ("gateway-1",),
        timeout_s: float = 40.0,
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
            assert not all(stream.ended for stream in self.streams), "ended before the fault"
            await asyncio.sleep(POLL_S)
        assert not all(stream.ended for stream in self.streams), "ended before the fault"

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


@asynccontextmanager
async def worker_fault(make: MakeWave, cluster: RunningCluster, role: str) -> AsyncIterator[str]:
    """Load, and an instance of the role that has work for the block to end; afterwards all is as if it had not."""
    # Prefill is caught while most prompts are still to be computed, decode while all its streams run.
    async with make(streams=24) if role == "prefill" else make(output_tokens=600) as disturbed:
        await disturbed.until_tokens(1)
        yield await busiest(cluster, Role.Value(f"ROLE_{role.upper()}"))
    disturbed.check_whole()
    assert any(stream.attempts > 1 for stream in disturbed.streams), "the fault met no request"


async def whole_again(cluster: RunningCluster, make: MakeWave) -> None:
    """All instances answer, requests are served, and nothing is held afterwards."""
    await cluster.until_members(*(name for _, name in cluster.spec.instances()), within_s=PATIENCE_S)
    await run_whole(make(streams=4, output_tokens=20))
    # What a frozen process left half done ends with the longest of all deadlines, that of a KV message (30 s).
    await cluster.holds_are_zero(within_s=40.0)
