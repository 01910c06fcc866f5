"""Load that goes on while a cluster is changed: streams follow one another, and every one of them must be whole."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from harness.running import RunningCluster
from harness.streams import Stream
from tidemill.client import Client
from tidemill.errors import STATUS_DETAILS_KEY
from tidemill.v1 import errors_pb2

POLL_S = 0.02
LEAVING = "this gateway is shutting down"
PATIENCE_S = 400.0
REFUSED_PAUSE_S = 0.05


class SteadyLoad:
    """So many lanes, each with one stream at a time; the prompts go round.

    A gateway that is gone or leaves is left for the next one, as any balancer does; everything else is a failure.
    """

    def __init__(
        self,
        cluster: RunningCluster,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        lanes: int = 6,
        gateways: Sequence[str] = ("gateway-1",),
        timeout_s: float = 300.0,
    ) -> None:
        self.streams: list[Stream] = []
        self.refusals = 0
        self._cluster, self._lanes, self._timeout_s = cluster, lanes, timeout_s
        self._cases = itertools.cycle(list(zip(prompts, answers, strict=True)))
        self._gateways = list(gateways)
        self._bound_s = timeout_s + 2 * float(cluster.spec.settings["all"]["liveness_s"])
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        # Connections stay open, as those of real clients do: a gateway that leaves has to say so on them.
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._lane(lane)) for lane in range(self._lanes)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        _, hung = await asyncio.wait(self._tasks, timeout=self._bound_s)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        if error is None:
            assert not hung, f"{len(hung)} streams have not ended {self._bound_s:.0f} s after the last event"
            for task in self._tasks:
                task.result()

    @property
    def served(self) -> int:
        """Streams that have ended."""
        return sum(stream.ended for stream in self.streams)

    async def until_served(self, more: int) -> None:
        """Waits until so many more streams have ended; fails at the first that is not whole."""
        wanted, end = self.served + more, time.monotonic() + PATIENCE_S
        while self.served < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < end, f"{more} more streams did not end within {PATIENCE_S:.0f} s"
            await asyncio.sleep(POLL_S)

    def _client(self, endpoint: str) -> Client:
        if endpoint not in self._clients:
            self._clients[endpoint] = Client(endpoint)
        return self._clients[endpoint]

    async def _lane(self, lane: int) -> None:
        gateways = itertools.cycle(self._gateways[lane % len(self._gateways) :] + self._gateways)
        while not self._stopping:
            prompt, expected = next(self._cases)
            stream = await self._run(gateways, prompt, expected)
            stream.check_whole()
            assert stream.took_s <= self._bound_s

    async def _run(self, gateways: "itertools.cycle[str]", prompt: Sequence[int], expected: Sequence[int]) -> Stream:
        end = time.monotonic() + self._timeout_s
        while True:
            stream = Stream(next(gateways), prompt, expected, self._timeout_s)
            endpoint = self._cluster.endpoint_now(stream.gateway)
            if endpoint is not None:
                self.streams.append(stream)
                await stream.run(self._client(endpoint), self._cluster.model)
                if not was_refused(stream):
                    return stream
                self.streams.remove(stream)
                self.refusals += 1
            assert time.monotonic() < end, f"no gateway took a request within {self._timeout_s:.0f} s: {stream.error}"
            await asyncio.sleep(REFUSED_PAUSE_S)


def was_refused(stream: Stream) -> bool:
    """Whether its gateway was gone, or leaving, before anything of the request had begun.

    What a gateway that stays says itself is a failure, also "no instance is available".
    """
    error = stream.error
    if error is None or error.code != errors_pb2.ERROR_CODE_UNAVAILABLE or stream.tokens:
        return False
    call = error.__cause__
    assert isinstance(call, grpc.aio.AioRpcError), "the client names the failed call"
    own_words = any(key == STATUS_DETAILS_KEY for key, _ in call.trailing_metadata() or ())
    return not own_words or error.message == LEAVING
