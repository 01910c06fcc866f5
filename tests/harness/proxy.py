"""A line to one server that a test cuts: nothing passes, nothing is closed, and nobody is told."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from tidemill_mesh.listener import Listener

CHUNK_BYTES = 64 * 1024


class Proxy:
    """Forwards TCP connections to a server, for clients that are told this address instead."""

    def __init__(self, server: str, listen: str = "127.0.0.1") -> None:
        self._host, _, port = server.rpartition(":")
        self._port, self._listen = int(port), listen
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        bound = socket.socket()
        try:
            bound.bind((self._listen, 0))
        except OSError:
            bound.close()
            raise
        self.port = int(bound.getsockname()[1])
        loop = asyncio.get_running_loop()
        # Not a server of asyncio's: it loses connections that it takes while it closes, and tests are blamed for them.
        self._listener = Listener(
            bound, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), self._accept, loop=loop)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that ended before it began has closed nothing, and closing takes a turn of the loop.
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"{self._listen}:{self.port}"

    def cut(self) -> None:
        """From now on bytes stay where they are."""
        self._open.clear()

    def mend(self) -> None:
        """All that waited goes on."""
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._tasks.add(asyncio.create_task(self._join(reader, writer)))

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
                self._writers.add(far_writer)
                await asyncio.gather(self.forward_there(reader, far_writer), self._forward(far_reader, writer))
        finally:
            writer.close()

    async def forward_there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What a client sends, until it has gone."""
        await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                writer.write(chunk)
                await writer.drain()
            # That a side has gone is not heard of either.
            await self._open.wait()
        writer.close()


class SharedLine:
    """A proxy that runs beside all tests of a module, for a whole cluster."""

    def __init__(self, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy, self._loop = proxy, loop

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return self._proxy.address

    def cut(self) -> None:
        """From now on bytes stay where they are."""
        self._loop.call_soon_threadsafe(self._proxy.cut)

    def mend(self) -> None:
        """All that waited goes on."""
        self._loop.call_soon_threadsafe(self._proxy.mend)


@contextmanager
def shared_line(server: str, listen: str) -> Iterator[SharedLine]:
    """A proxy on a thread and a loop of its own, for the length of the block."""
    started: Future[tuple[Proxy, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        try:
            async with Proxy(server, listen) as proxy:
                over = asyncio.Event()
                started.set_result((proxy, asyncio.get_running_loop(), over))
                await over.wait()
        except OSError as error:
            started.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        proxy, loop, over = started.result()
        try:
            yield SharedLine(proxy, loop)
        finally:
            loop.call_soon_threadsafe(over.set)
    finally:
        thread.join()
