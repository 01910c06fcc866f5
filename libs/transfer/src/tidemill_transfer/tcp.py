"""Plain TCP behind the seam, where UCX cannot be had and slowness is accepted by name.

Bytes travel on the link itself, in chunks, so that concurrent messages share it fairly:

    sender    OFFER(tag, size) ------------> receiver      as soon as it has a link
              <------------- GRANT(tag)                    once a buffer waits (or DECLINE: nobody wants it)
              CHUNK(tag) CHUNK(tag) ... --->               straight into that buffer
"""

import asyncio
import secrets
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidemill_transfer.agent import Bytes
from tidemill_transfer.arrivals import Arrivals
from tidemill_transfer.buffers import byte_view
from tidemill_transfer.deadlines import CLOSE_S, WITHDRAW_S, Deadline, despite_cancel
from tidemill_transfer.errors import TransferError
from tidemill_transfer.frames import CHUNK_BYTES, FrameType
from tidemill_transfer.handshake import Fields
from tidemill_transfer.links import Link, Links
from tidemill_transfer.tags import checked_tag

_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class _Offer:
    """A message that a peer holds ready."""

    link: Link
    tag: int
    size_bytes: int


@dataclass(eq=False)
class _Outgoing:
    """A message that was offered; `answer` is True when granted, False when nobody wants it."""

    answer: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    declined: bool = False


@dataclass(eq=False)
class _Incoming:
    """A granted message; `done` tells whether all of it has come."""

    rest: memoryview
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    reading: asyncio.Future[None] | None = None
    """Not done while a chunk is being read into the buffer."""

    def end(self, complete: bool) -> None:
        if not self.done.done():
            self.done.set_result(complete)

    def end_reading(self) -> None:
        if self.reading is not None and not self.reading.done():
            self.reading.set_result(None)


class TcpAgent:
    """Implements TransferAgent on links alone."""

    def __init__(self, host: str, advertise_host: str) -> None:
        self.counters: Counter[str] = Counter()
        self._arrivals: Arrivals[_Offer] = Arrivals(self._decline, self.counters)
        self._outgoing: dict[tuple[Link, int], _Outgoing] = {}
        self._incoming: dict[tuple[Link, int], _Incoming] = {}
        self._operations: Counter[str] = Counter()
        self._links = Links(self, "tcp", host, advertise_host, secrets.token_hex(8))

    @property
    def address(self) -> str:
        return str(self._links.address)

    @property
    def takes_device_memory(self) -> bool:
        return False

    @property
    def holds(self) -> dict[str, int]:
        return {
            "links": self._links.count,
            "sends": self._operations["send"],
            "receives": self._operations["recv"],
            "requests": len(self._outgoing) + len(self._incoming),
            "unclaimed_messages": self._arrivals.num_unclaimed,
        }

    async def send(self, peer_address: str, tag: int, data: memoryview | Bytes, deadline_s: float) -> None:
        deadline = Deadline.after(deadline_s)
        view = byte_view(data)
        checked_tag(tag)
        with self._operation("send"):
            await self._links.with_link(peer_address, deadline, lambda link: self._send_on(link, tag, view, deadline))

    async def _send_on(self, link: Link, tag: int, view: memoryview, deadline: Deadline) -> None:
        if link.lost.done():
            raise TransferError("peer_lost", f"{link.peer}: {link.lost.result()}")
        if (link, tag) in self._outgoing:
            raise TransferError("unavailable", f"another message of tag {tag} is on its way to that peer")
        outgoing = self._outgoing[link, tag] = _Outgoing()
        try:
            link.writer.post(FrameType.OFFER, tag, _SIZE.pack(len(view)))
            await asyncio.wait([outgoing.answer], timeout=deadline.left_s())
            if not outgoing.answer.done():
                raise TransferError("deadline", f"{link.peer} has not asked for the message in time")
            if outgoing.answer.result():
                await self._send_chunks(link, tag, view, outgoing, deadline)
        except (TransferError, asyncio.CancelledError):
            if not link.lost.done():
                link.writer.post(FrameType.WITHDRAW, tag)
            raise
        finally:
            del self._outgoing[link, tag]

    async def _send_chunks(
        self, link: Link, tag: int, view: memoryview, outgoing: _Outgoing, deadline: Deadline
    ) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            if outgoing.declined:
                return
            written = link.writer.post_chunk(tag, view[start : start + CHUNK_BYTES])
            try:
                await asyncio.wait([written], timeout=deadline.left_s())
            except asyncio.CancelledError:
                await despite_cancel(self._end(written, link))
                raise
            if not written.done():
                await despite_cancel(self._end(written, link))
                raise TransferError("deadline", f"{link.peer} has not taken the message in time")
            if written.cancelled():
                reason = link.lost.result() if link.lost.done() else "the connection failed"
                raise TransferError("peer_lost", f"{link.peer}: {reason}")

    async def recv(self, peer_address: str, tag: int, out: Bytes, deadline_s: float) -> None:
        deadline = Deadline.after(deadline_s)
        with self._operation("recv"):
            offer = await self._links.with_link(
                peer_address,
                deadline,
                lambda link: self._arrivals.take((link.peer.incarnation, checked_tag(tag)), deadline),
            )
            if offer.size_bytes != out.nbytes:
                self._decline(offer)
                raise TransferError("truncated", f"expected {out.nbytes} bytes, {offer.size_bytes} came")
            if offer.link.lost.done():
                raise TransferError("peer_lost", f"{offer.link.peer}: {offer.link.lost.result()}")
            await self._receive(offer, out, deadline)

    async def _receive(self, offer: _Offer, out: Bytes, deadline: Deadline) -> None:
        key = (offer.link, offer.tag)
        incoming = self._incoming[key] = _Incoming(byte_view(out))
        try:
            offer.link.writer.post(FrameType.GRANT, offer.tag)
            await asyncio.wait([incoming.done], timeout=deadline.left_s())
            if not incoming.done.done():
                raise TransferError("deadline", f"{offer.link.peer} has not sent all in time")
            if not incoming.done.result():
                raise TransferError("peer_lost", f"{offer.link.peer} has stopped in mid-message")
        except (TransferError, asyncio.CancelledError):
            incoming.end(complete=False)
            self._decline(offer)
            if incoming.reading is not None:
                await despite_cancel(self._end(incoming.reading, offer.link))
            raise
        finally:
            del self._incoming[key]

    async def _end(self, done: "asyncio.Future[None]", link: Link) -> None:
        """Waits until a buffer is no longer touched; a peer that does not let go of it loses the link."""
        await asyncio.wait([done], timeout=WITHDRAW_S)
        if not done.done():
            self.counters["aborted_links"] += 1
            link.lose("an operation did not end in time")
            await asyncio.wait([done], timeout=CLOSE_S)

    async def close(self) -> None:
        await self._links.close()
        self._arrivals.close()

    def _decline(self, offer: _Offer) -> None:
        if not offer.link.lost.done():
            offer.link.writer.post(FrameType.DECLINE, offer.tag)

    # --- links ---

    def hello_fields(self) -> Fields:
        return {}

    def end_fields(self, local: Fields) -> None:
        pass

    def check_fields(self, remote: Fields) -> None:
        pass

    def link_opened(self, link: Link) -> None:
        pass

    def link_lost(self, link: Link, reason: str) -> None:
        for (owner, _), outgoing in self._outgoing.items():
            if owner is link and not outgoing.answer.done():
                outgoing.answer.set_exception(TransferError("peer_lost", f"{link.peer}: {reason}"))
        for (owner, _), incoming in self._incoming.items():
            if owner is link:
                incoming.end(complete=False)
                incoming.end_reading()
        if not self._links.joined(link.peer.incarnation):
            self._arrivals.peer_lost(link.peer.incarnation, f"{link.peer}: {reason}")

    async def read_frame(self, link: Link, kind: FrameType, tag: int, length: int) -> None:
        if kind == FrameType.CHUNK:
            await self._read_chunk(link, tag, length)
            return
        payload = await link.reader.read_bytes(length)
        if kind == FrameType.OFFER:
            if length != _SIZE.size:
                raise TransferError("peer_lost", "an offer without a size")
            self._arrivals.arrived((link.peer.incarnation, tag), _Offer(link, tag, _SIZE.unpack(payload)[0]))
        elif kind == FrameType.WITHDRAW:
            if (incoming := self._incoming.get((link, tag))) is not None:
                incoming.end(complete=False)
            else:
                self._arrivals.withdrawn((link.peer.incarnation, tag))
        elif (outgoing := self._outgoing.get((link, tag))) is not None:
            outgoing.declined |= kind == FrameType.DECLINE
            if not outgoing.answer.done():
                outgoing.answer.set_result(kind == FrameType.GRANT)

    async def _read_chunk(self, link: Link, tag: int, length: int) -> None:
        incoming = self._incoming.get((link, tag))
        if incoming is None or incoming.done.done():
            await link.reader.read_bytes(length)  # given up meanwhile
            return
        if length > len(incoming.rest):
            raise TransferError("peer_lost", "more bytes than offered")
        incoming.reading = asyncio.get_running_loop().create_future()
        await link.reader.read_into(incoming.rest[:length])
        incoming.end_reading()
        incoming.rest = incoming.rest[length:]
        if not incoming.rest:
            incoming.end(complete=True)

    @contextmanager
    def _operation(self, kind: str) -> Iterator[None]:
        self._operations[kind] += 1
        try:
            yield
        finally:
            self._operations[kind] -= 1


async def open_tcp_agent(host: str, advertise_host: str) -> TcpAgent:
    """Opens an agent on the running loop."""
    return TcpAgent(host, advertise_host)
