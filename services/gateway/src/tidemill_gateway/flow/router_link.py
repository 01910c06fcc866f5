"""The one stream to one incarnation of a router: calls go out once a loop tick, answers come in any order."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from grpc.aio import AioRpcError

from tidemill.mesh.v1.router_pb2 import (
    RouterAnswer,
    RouterCall,
    RouterServiceConnectRequest,
    RouterServiceConnectResponse,
)
from tidemill_mesh.errors import MeshError
from tidemill_mesh.streams.client import ClientStream
from tidemill_mesh.tasks import end, spawn


class RouterAway(Exception):
    """No router answers; the message says why."""


class RouterLink:
    """Opened when it is made; once `broken` it stays so, and its owner makes another."""

    def __init__(self, instance: str, dial: Callable[[], Awaitable[ClientStream]]) -> None:
        self.broken = False
        self._instance = instance
        self._dial = dial
        self._stream: ClientStream | None = None
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        self._ids = itertools.count(1)
        self._outbox: list[RouterCall] = []
        self._answers: dict[int, asyncio.Future[RouterAnswer]] = {}
        self._task = spawn(self._run(), f"link to {instance}")

    async def ask(self, call: RouterCall, timeout_s: float) -> RouterAnswer:
        """The router's answer; MeshError where it refuses, RouterAway without an answer in time."""
        if self.broken:
            raise RouterAway(f"{self._instance}: the stream is broken")
        call.id = next(self._ids)
        answer: asyncio.Future[RouterAnswer] = self._loop.create_future()
        self._answers[call.id] = answer
        self._outbox.append(call)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._send_outbox)
        # A timer of its own costs a third of asyncio.timeout.
        timer = self._loop.call_later(timeout_s, self._give_up, answer, timeout_s)
        try:
            given = await answer
        finally:
            timer.cancel()
            del self._answers[call.id]
        if given.WhichOneof("answer") == "error":
            raise MeshError.from_detail(given.error)
        return given

    async def close(self) -> None:
        """Ends the stream; calls without an answer fail."""
        await end(self._task)

    async def _run(self) -> None:
        reason = "the link is closed"
        stream: ClientStream | None = None
        try:
            stream = await self._dial()
            ended = stream.ending()
            stream.on_message = self._take_message
            stream.on_writable = self._send_outbox
            self._stream = stream
            self._send_outbox()
            error = await ended
            reason = "the router ended the stream" if error is None else f"{error.code().name}: {error.details()}"
        except AioRpcError as error:
            reason = str(error.details())
        finally:
            self._break(reason)
            if stream is not None:
                stream.cancel()

    def _take_message(self, data: bytes) -> None:
        for given in RouterServiceConnectResponse.FromString(data).answers:
            answer = self._answers.get(given.id)
            if answer is not None and not answer.done():
                answer.set_result(given)

    def _send_outbox(self) -> None:
        """Sends what one loop tick has gathered, once the router takes it."""
        self._flush_due = False
        if self._outbox and self._stream is not None and self._stream.writable:
            calls, self._outbox = self._outbox, []
            self._stream.send(RouterServiceConnectRequest(calls=calls).SerializeToString())

    def _give_up(self, answer: asyncio.Future[RouterAnswer], timeout_s: float) -> None:
        if not answer.done():
            answer.set_exception(RouterAway(f"{self._instance}: no answer within {timeout_s:g} s"))

    def _break(self, reason: str) -> None:
        self.broken, self._stream = True, None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RouterAway(f"{self._instance}: {reason}"))
