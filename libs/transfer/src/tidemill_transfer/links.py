"""Links between agents: who is joined with whom.

A link is one TCP socket. Its end is how a dead peer is noticed at once, whatever transport moves the bytes, and what
comes through it is known to come from the run that its handshake named.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tidemill_transfer.address import AgentAddress, parse_address
from tidemill_transfer.deadlines import Deadline
from tidemill_transfer.errors import TransferError
from tidemill_transfer.frames import FrameReader, FrameType, FrameWriter, prepare_socket
from tidemill_transfer.handshake import Fields, answer, greet

HANDSHAKE_S = 30.0
MAX_HANDSHAKES = 512
BACKLOG = 1024
ACCEPT_AGAIN_S = 1.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Link:
    """A joined peer, with the transport's own fields of both hellos."""

    def __init__(self, sock: socket.socket, peer: AgentAddress, local: Fields, remote: Fields) -> None:
        self.sock = sock
        self.peer = peer
        self.local = local
        self.remote = remote
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the link is no longer to be used."""
        self.reader = FrameReader(sock)
        self.writer = FrameWriter(sock, self.lose)

    def lose(self, reason: str) -> None:
        """Gives the link up; it is taken down in the next turn of the loop."""
        if not self.lost.done():
            self.lost.set_result(reason)


class LinkUser(Protocol):
    """The transport that owns the links."""

    def hello_fields(self) -> Fields:
        """Fields of this side for a new link; end_fields follows when it is over or has never come to be."""

    def end_fields(self, local: Fields) -> None: ...

    def check_fields(self, remote: Fields) -> None:
        """Raises TransferError "unavailable" when a peer's fields are not usable."""

    def link_opened(self, link: Link) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None: ...

    async def read_frame(self, link: Link, kind: FrameType, tag: int, length: int) -> None:
        """Reads the frame's payload from link.reader and acts on it."""


class Links:
    """All links of one agent."""

    def __init__(self, user: LinkUser, transport: str, host: str, advertise_host: str, incarnation: str) -> None:
        self._user = user
        self._by_incarnation: dict[str, list[Link]] = {}
        self._connecting: dict[str, asyncio.Task[Link]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._handshake_tasks: set[asyncio.Task[Any]] = set()
        self._handshakes = 0
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        port = int(self._listener.getsockname()[1])
        self.address = AgentAddress(transport, advertise_host or _reachable(host), port, incarnation)
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener, self._accept)

    @property
    def count(self) -> int:
        return sum(len(links) for links in self._by_incarnation.values())

    def joined(self, incarnation: str) -> bool:
        """Whether any link with that run stands."""
        return incarnation in self._by_incarnation

    async def get(self, peer_address: str, timeout_s: float) -> Link:
        """The link to a peer, opened by one handshake for all who ask at once."""
        peer = parse_address(peer_address)
        if peer.transport != self.address.transport:
            raise TransferError("unavailable", f"{peer_address} is not reachable by {self.address.transport}")
        standing = [link for link in self._by_incarnation.get(peer.incarnation, ()) if not link.lost.done()]
        if standing:
            return standing[-1]
        if self._closed:
            raise TransferError("peer_lost", "the agent is closed")
        task = self._connecting.get(peer.incarnation)
        if task is None:
            task = self._spawn(self._connect(peer), self._handshake_tasks)
            self._connecting[peer.incarnation] = task
            task.add_done_callback(lambda _: self._connecting.pop(peer.incarnation, None))
        done, _ = await asyncio.wait([task], timeout=max(0.0, timeout_s))
        if not done:
            raise TransferError("deadline", f"no connection to {peer_address} in time")
        if task.cancelled():
            raise TransferError("peer_lost", "the agent is closed")
        return task.result()

    async def with_link(
        self, peer_address: str, deadline: Deadline, operation: Callable[[Link], Coroutine[Any, Any, T]]
    ) -> T:
        """Runs an operation on the peer's link, once more on a new one when that link turns out to be dead."""
        link = await self.get(peer_address, deadline.left_s())
        try:
            return await operation(link)
        except TransferError as error:
            if error.code != "peer_lost" or not link.lost.done():
                raise
        return await operation(await self.get(peer_address, deadline.left_s()))

    async def close(self) -> None:
        """Takes all links down and waits for their tasks."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._resume is not None:
            self._resume.cancel()
        for task in self._handshake_tasks:
            task.cancel()
        if self._handshake_tasks:
            await asyncio.wait(self._handshake_tasks)
        for link in [link for links in self._by_incarnation.values() for link in links]:
            link.lose("the agent is closed")
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, T], tasks: "set[asyncio.Task[Any]]") -> "asyncio.Task[T]":
        task = asyncio.create_task(work, name="transfer-link")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    async def _connect(self, peer: AgentAddress) -> Link:
        family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        local = self._user.hello_fields()
        try:
            prepare_socket(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                remote = await greet(sock, self.address, peer, local)
            self._user.check_fields(remote)
        except BaseException as error:
            sock.close()
            self._user.end_fields(local)
            if isinstance(error, TimeoutError):
                raise TransferError("peer_lost", f"{peer} does not answer the handshake") from error
            if isinstance(error, OSError):
                raise TransferError("peer_lost", f"{peer}: {error}") from error
            raise
        return self._open(sock, peer, local, remote)

    def _accept(self) -> None:
        """Takes one connection; not awaited, so that closing loses none in between."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory: what waits in the backlog keeps
            _log.error("cannot take transfer connections: %s; tried again in %.0f s", error, ACCEPT_AGAIN_S)
            self._loop.remove_reader(self._listener)
            self._resume = self._loop.call_later(ACCEPT_AGAIN_S, self._loop.add_reader, self._listener, self._accept)
            return
        if self._handshakes >= MAX_HANDSHAKES:
            _log.warning("refused a transfer connection: %d handshakes are open", self._handshakes)
            sock.close()
            return
        task = self._spawn(self._answer(sock), self._handshake_tasks)
        task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)  # perhaps before its start

    async def _answer(self, sock: socket.socket) -> None:
        self._handshakes += 1
        local = self._user.hello_fields()
        try:
            prepare_socket(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                peer, remote = await answer(sock, self.address, local)
            self._user.check_fields(remote)
        except BaseException as error:
            sock.close()
            self._user.end_fields(local)
            if not isinstance(error, OSError | TimeoutError | TransferError):
                raise
            _log.warning("a transfer handshake failed: %s", error or "no hello in time")
        else:
            self._open(sock, peer, local, remote)
        finally:
            self._handshakes -= 1

    def _open(self, sock: socket.socket, peer: AgentAddress, local: Fields, remote: Fields) -> Link:
        link = Link(sock, peer, local, remote)
        self._by_incarnation.setdefault(peer.incarnation, []).append(link)
        self._user.link_opened(link)
        self._spawn(self._run(link), self._tasks)
        return link

    async def _run(self, link: Link) -> None:
        reading = asyncio.create_task(self._read(link), name="transfer-reader")
        reading.add_done_callback(_log_failure)
        ends: list[asyncio.Future[Any]] = [reading, link.lost]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        link.lose("the link's reader failed")
        standing = self._by_incarnation[link.peer.incarnation]
        standing.remove(link)
        if not standing:
            del self._by_incarnation[link.peer.incarnation]
        self._user.link_lost(link, link.lost.result())
        reading.cancel()
        await asyncio.wait([reading])
        await link.writer.close()
        link.sock.close()
        self._user.end_fields(link.local)

    async def _read(self, link: Link) -> None:
        try:
            while True:
                kind, tag, length = await link.reader.read_header()
                await self._user.read_frame(link, kind, tag, length)
        except (OSError, TransferError) as error:
            link.lose(str(error))


def _reachable(host: str) -> str:
    """What peers are told for a bind to `host`: the machine's name for a wildcard."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    return socket.gethostname() if unspecified else host


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, TransferError):
        _log.error("a task of the transfer links failed", exc_info=error)
