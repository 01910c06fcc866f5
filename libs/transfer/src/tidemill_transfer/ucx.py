"""UCX behind the seam; the only file that imports ucxx.

Its low-level binding is used, with our own progress on the event loop: the binding's own waiting polls, so that one
pending receive would keep a core busy. A receive is posted to UCX only once its message is here (probed), so giving
one up leaves nothing behind; until then a large message's bytes stay with the sender (rendezvous).

A wire tag of 64 bits is | slot: 16 | (tag ^ key): 48 |, slot and key being what the receiver gave the sender for this
link: a message that carries another slot or key is nobody's and is dropped.
"""

import asyncio
import logging
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill_transfer.agent import Bytes
from tidemill_transfer.arrivals import Arrivals
from tidemill_transfer.buffers import byte_view
from tidemill_transfer.deadlines import CLOSE_S, WITHDRAW_S, Deadline, despite_cancel
from tidemill_transfer.errors import TransferError, TransportUnavailable
from tidemill_transfer.frames import FrameType
from tidemill_transfer.handshake import Fields
from tidemill_transfer.links import Link, Links
from tidemill_transfer.progress import Progress
from tidemill_transfer.tags import MAX_TAG, TAG_BITS, checked_tag

# Below it a message is sent at once and copied once more on arrival, which costs less than asking first.
_EAGER_BYTES = 128 << 10
_ENVIRONMENT = {
    "UCX_TLS": "tcp,self" if not os.path.exists("/dev/nvidiactl") else "tcp,self,cuda_copy,cuda_ipc",
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    "UCX_RNDV_THRESH": str(_EAGER_BYTES),
    # With blocking connects, UCX 1.19-1.22 aborts the process when a peer dies between a connect and its accept: the
    # second connect is refused, and the endpoint is destroyed with its first message in its queue.
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",  # it logs to stdout; what goes wrong reaches us as a status
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

try:
    from ucxx import libucxx
    from ucxx._lib.arr import Array
except (ImportError, OSError) as error:
    raise TransportUnavailable(f"ucx: {error} (transport=tcp needs none of it, and is slower)") from error

_ANY = (libucxx.UCXXTag(0), libucxx.UCXXTagMask(0))
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_SLOT_BITS = 16
_ENDPOINT_CLOSE_NS = 10**9

_log = logging.getLogger(__name__)


@dataclass
class _Message:
    """An arrived message whose bytes have not been asked for."""

    link: Link
    size_bytes: int
    probe: Any


@dataclass
class _Slot:
    """Where the messages of one link arrive."""

    key: int
    link: Link | None = None
    early: list[Any] = field(default_factory=list)
    """Came before the handshake was over."""
    over: bool = False


class UcxAgent:
    """Implements TransferAgent; one UCX worker."""

    def __init__(self, host: str, advertise_host: str) -> None:
        options = {"NET_DEVICES": "lo"} if _is_loopback(host) and "UCX_NET_DEVICES" not in os.environ else {}
        self._context = libucxx.UCXContext(options)
        self._worker = libucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._slots: dict[int, _Slot] = {}
        self._endpoints: dict[Link, Any] = {}
        self.counters: Counter[str] = Counter()
        self._arrivals: Arrivals[_Message] = Arrivals(lambda message: self._drop(message.probe), self.counters)
        self._operations: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._progress = Progress(self._worker, self._collect, lambda: self._arrivals.num_waiting > 0)
        self._links = Links(self, "ucx", host, advertise_host, secrets.token_hex(8))

    @property
    def address(self) -> str:
        return str(self._links.address)

    @property
    def takes_device_memory(self) -> bool:
        return "cuda" in os.environ["UCX_TLS"]

    @property
    def holds(self) -> dict[str, int]:
        return {
            "links": self._links.count,
            "sends": self._operations["send"],
            "receives": self._operations["recv"],
            "requests": self._progress.outstanding,
            "unclaimed_messages": self._arrivals.num_unclaimed,
        }

    async def send(self, peer_address: str, tag: int, data: memoryview | Bytes, deadline_s: float) -> None:
        deadline = Deadline.after(deadline_s)
        array = _array(data)

        async def send_on(link: Link) -> None:
            wire_tag = (link.remote["slot"] << TAG_BITS) | (checked_tag(tag) ^ link.remote["key"])
            endpoint = self._endpoint(link)
            with _as_peer_lost(link):
                request = endpoint.tag_send(array, libucxx.UCXXTag(wire_tag))
            await self._finish(request, array, link, deadline, lambda: link.writer.post(FrameType.WITHDRAW, tag))

        with self._operation("send"):
            await self._links.with_link(peer_address, deadline, send_on)

    async def recv(self, peer_address: str, tag: int, out: Bytes, deadline_s: float) -> None:
        deadline = Deadline.after(deadline_s)
        array = _array(out)

        async def take_on(link: Link) -> _Message:
            return await self._arrivals.take((link.peer.incarnation, checked_tag(tag)), deadline)

        with self._operation("recv"):
            message = await self._links.with_link(peer_address, deadline, take_on)
            if message.size_bytes != array.nbytes:
                self._drop(message.probe)
                raise TransferError("truncated", f"expected {array.nbytes} bytes, {message.size_bytes} came")
            request = self._receive(message, array)
            await self._finish(request, array, message.link, deadline, lambda: None)

    async def close(self) -> None:
        await self._links.close()
        self._arrivals.close()
        ends = self._loop.time() + CLOSE_S
        while self._progress.outstanding and self._loop.time() < ends:
            self._progress.poke()
            await asyncio.sleep(0.001)
        self._progress.run_turn()
        self._progress.close()
        del self._worker, self._context  # UCX lets go of its sockets only with its objects

    def _receive(self, message: _Message, array: Any) -> Any:
        try:
            receiver = self._worker if message.link.lost.done() else self._endpoint(message.link)
        except TransferError:
            self._drop(message.probe)
            raise
        with _as_peer_lost(message.link):
            return receiver.tag_recv_with_handle(array, message.probe)

    async def _finish(
        self, request: Any, buffer: Any, link: Link, deadline: Deadline, withdraw: Callable[[], None]
    ) -> None:
        """Waits until the request is over; its buffer is no longer touched when this returns or raises."""
        done = self._progress.track(request, buffer)
        try:
            await asyncio.wait([done], timeout=deadline.left_s())
        except asyncio.CancelledError:
            await despite_cancel(self._end(done, link, withdraw))
            raise
        if not done.done():
            await despite_cancel(self._end(done, link, withdraw))
            raise TransferError("deadline", f"{link.peer} has not finished in time")
        try:
            request.check_error()
        except libucxx.UCXMessageTruncatedError as error:
            raise TransferError("truncated", str(error)) from error
        except libucxx.UCXError as error:
            raise _endpoint_failed(link, error) from error

    async def _end(self, done: "asyncio.Future[None]", link: Link, withdraw: Callable[[], None]) -> None:
        """Ends a request before its time: asks the peer to let go, then takes the link down."""
        withdraw()
        await asyncio.wait([done], timeout=WITHDRAW_S)
        if done.done():
            return
        self.counters["aborted_links"] += 1
        link.lose("an operation did not end in time")
        await asyncio.wait([done], timeout=CLOSE_S)
        if not done.done():
            _log.error("a UCX request to %s outlives its endpoint; its buffer is kept", link.peer)

    # --- messages ---

    def _collect(self) -> None:
        while True:
            probe = self._worker.tag_probe(*_ANY, remove=True)
            if not probe.matched:
                return
            self._arrived(probe)

    def _arrived(self, probe: Any) -> None:
        wire_tag = _tag_value(probe.sender_tag)
        slot = self._slots.get(wire_tag >> TAG_BITS)
        if slot is None or slot.over:
            self.counters["unknown_messages"] += 1
            self._drop(probe)
            return
        link = slot.link
        if link is None:
            slot.early.append(probe)
            return
        tag = (wire_tag & MAX_TAG) ^ slot.key
        message = _Message(link, probe.length, probe)
        held_bytes = message.size_bytes if message.size_bytes <= _EAGER_BYTES else 0
        self._arrivals.arrived((link.peer.incarnation, tag), message, held_bytes)

    def _drop(self, probe: Any) -> None:
        """Receives into too small a buffer: the sender's request ends, the bytes go nowhere."""
        scratch = np.empty(1, np.uint8)
        self._progress.track(self._worker.tag_recv_with_handle(Array(scratch), probe), scratch)

    # --- links ---

    def hello_fields(self) -> Fields:
        slot = secrets.randbits(_SLOT_BITS)
        while slot in self._slots:
            slot = secrets.randbits(_SLOT_BITS)
        key = secrets.randbits(TAG_BITS)
        self._slots[slot] = _Slot(key)
        return {"slot": slot, "key": key, "worker": self._worker.address.tobytes().hex()}

    def check_fields(self, remote: Fields) -> None:
        slot, key, worker = (remote.get(name) for name in ("slot", "key", "worker"))
        if not (isinstance(slot, int) and 0 <= slot < 1 << _SLOT_BITS and isinstance(key, int) and 0 <= key <= MAX_TAG):
            raise TransferError("unavailable", "the peer's hello has no valid slot and key")
        if not isinstance(worker, str) or not _HEX.fullmatch(worker):
            raise TransferError("unavailable", "the peer's hello has no valid worker address")

    def end_fields(self, local: Fields) -> None:
        for probe in self._slots.pop(local["slot"]).early:
            self._drop(probe)

    def link_opened(self, link: Link) -> None:
        slot = self._slots[link.local["slot"]]
        slot.link = link
        early, slot.early = slot.early, []
        for probe in early:
            self._arrived(probe)
        self._progress.poke()

    def link_lost(self, link: Link, reason: str) -> None:
        self._progress.run_turn()  # takes what has come before the end
        self._slots[link.local["slot"]].over = True
        endpoint = self._endpoints.pop(link, None)
        if endpoint is not None:
            endpoint.close_blocking(period=_ENDPOINT_CLOSE_NS, max_attempts=1)
        self._progress.poke()
        if not self._links.joined(link.peer.incarnation):
            self._arrivals.peer_lost(link.peer.incarnation, f"{link.peer}: {reason}")

    async def read_frame(self, link: Link, kind: FrameType, tag: int, length: int) -> None:
        await link.reader.read_bytes(length)
        if kind == FrameType.WITHDRAW:
            self._progress.run_turn()
            self._arrivals.withdrawn((link.peer.incarnation, tag))

    def _endpoint(self, link: Link) -> Any:
        endpoint = self._endpoints.get(link)
        if endpoint is None:
            if link.lost.done():
                raise TransferError("peer_lost", f"{link.peer}: {link.lost.result()}")
            try:
                worker_address = libucxx.UCXAddress.create_from_buffer(bytes.fromhex(link.remote["worker"]))
                endpoint = libucxx.UCXEndpoint.create_from_worker_address(self._worker, worker_address, True)
            except libucxx.UCXError as error:
                raise _endpoint_failed(link, error) from error
            self._endpoints[link] = endpoint
        elif not endpoint.alive:
            raise _endpoint_failed(link, ConnectionResetError("UCX has lost the peer"))
        return endpoint

    @contextmanager
    def _operation(self, kind: str) -> Iterator[None]:
        self._operations[kind] += 1
        try:
            yield
        finally:
            self._operations[kind] -= 1


@contextmanager
def _as_peer_lost(link: Link) -> Iterator[None]:
    try:
        yield
    except libucxx.UCXError as error:
        raise _endpoint_failed(link, error) from error


def _endpoint_failed(link: Link, error: Exception) -> TransferError:
    """Ends the link too: UCX may give a peer up whose socket stands (one that was frozen), and a send tries again only
    on a new link."""
    link.lose(str(error))
    return TransferError("peer_lost", f"{link.peer}: {error}")


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def _array(buffer: Any) -> Any:
    """UCX takes device memory as it is."""
    return Array(buffer if hasattr(buffer, "__cuda_array_interface__") else byte_view(buffer))


def _tag_value(tag: Any) -> int:
    return int(getattr(tag, "value", tag))


async def open_ucx_agent(host: str, advertise_host: str) -> UcxAgent:
    """Opens an agent on the running loop; TransportUnavailable says what is missing."""
    try:
        return UcxAgent(host, advertise_host)
    except libucxx.UCXError as error:
        raise TransportUnavailable(f"ucx: {error}") from error
