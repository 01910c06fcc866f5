"""Takes the connections of a listening socket until it is closed, and forgets none.

asyncio's own server drops connections, open, that it has taken in the turn of the loop in which it closes; and it says
nothing of those whose TLS handshake still runs then, which go on without a server.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

import structlog

from tidemill_mesh.tasks import spawn

AT_ONCE = 100
"""Connections taken in one turn of the loop."""
AGAIN_S = 1.0
GONE = {
    errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENONET,
}  # fmt: skip
"""What `accept` says of a connection that was lost before it was taken (accept(2)): the next one may be well."""

log = structlog.get_logger()


class Listener:
    """Makes a protocol for each connection; with TLS once its handshake is done."""

    def __init__(
        self,
        bound: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        backlog: int = 100,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = bound
        self._make_protocol = make_protocol
        self._tls = tls
        self._joining: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        bound.setblocking(False)
        bound.listen(backlog)
        self._loop.add_reader(bound, self._accept)

    async def close(self) -> None:
        """Takes no more; a connection whose handshake is not done is closed, others are their protocol's."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            if self._again is not None:
                self._again.cancel()
        if self._tls is not None:
            for task in self._joining:
                task.cancel()
        # Without TLS it is a matter of two turns; uvloop never tells a protocol of a connection that is cancelled then.
        if self._joining:
            await asyncio.wait(self._joining)

    def _accept(self) -> None:
        """Not awaited, so that closing loses no connection in between."""
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno in GONE:
                    return
                # Out of descriptors or memory: what waits in the backlog keeps.
                log.error("cannot take connections", error=str(error), again_s=AGAIN_S)
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(AGAIN_S, self._loop.add_reader, self._socket, self._accept)
                return
            self._join(connection)

    def _join(self, connection: socket.socket) -> None:
        begun = False

        async def connect() -> None:
            nonlocal begun
            begun = True
            try:
                protocol = self._make_protocol()
            except BaseException:
                connection.close()
                raise
            # A client that leaves, or whose handshake fails: the loop has closed the connection.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)

        def over(task: asyncio.Task[None]) -> None:
            self._joining.discard(task)
            if not begun:  # cancelled before: nobody else knows of the connection
                connection.close()

        task = spawn(connect(), "new connection")
        self._joining.add(task)
        task.add_done_callback(over)
