"""A live request's outputs as server-sent events, written from where they arrive for as long as the client reads."""

import asyncio
from collections.abc import Callable, Sequence

from tidemill_gateway.http.errors import Header
from tidemill_gateway.http.exchange import Exchange
from tidemill_gateway.http.reply import DONE, Reply
from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.output import ChoiceOutput

EVENT_STREAM = b"text/event-stream; charset=utf-8"


async def send_events(
    exchange: Exchange,
    live: LiveRequest,
    reply: Reply,
    headers: Callable[[LiveRequest], Sequence[Header]],
    *,
    include_usage: bool,
) -> None:
    """Sends all of an answer; raises what ended the request. `headers` is asked when the first output is there."""
    stream = _EventStream(exchange, live, reply, headers, include_usage)
    live.on_ready = exchange.connection.on_writable = stream.advance
    try:
        stream.advance()
        await stream.done
    finally:
        live.on_ready = exchange.connection.on_writable = None


class _EventStream:
    """Called for each engine step that has something for the client: no task is woken for a token."""

    def __init__(
        self,
        exchange: Exchange,
        live: LiveRequest,
        reply: Reply,
        headers: Callable[[LiveRequest], Sequence[Header]],
        include_usage: bool,
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exchange = exchange
        self._live = live
        self._reply = reply
        self._headers = headers
        self._include_usage = include_usage

    def advance(self) -> None:
        """Sends what is there; what a client does not read stays with the request, which pauses its worker."""
        try:
            while self._live.has_news and self._exchange.connection.writable and not self.done.done():
                self._send(self._live.take_ready())
        except Exception as error:
            self.done.set_exception(error)

    def _send(self, batch: list[ChoiceOutput]) -> None:
        if not batch:
            return
        last = self._live.finished
        events = self._reply.events(batch, last=last)
        if not self._exchange.started:
            headers = [(b"cache-control", b"no-cache"), *self._headers(self._live)]
            self._exchange.start(200, EVENT_STREAM, headers)
            events = self._reply.opening() + events
        if last:
            events += (self._reply.usage_event() if self._include_usage else b"") + DONE
            self.done.set_result(None)
        self._exchange.write(events, last=last)
