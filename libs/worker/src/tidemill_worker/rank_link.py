"""One rank process and the socket on which it takes commands and reports."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from tidemill_engine import messages
from tidemill_mesh.listener import Listener
from tidemill_mesh.tasks import wait_up_to
from tidemill_worker.child_process import ChildProcess
from tidemill_worker.frames import FrameError, pack_frame, read_frame

KILL_WAIT_S = 5.0
EXPLAIN_LOOKS = 10
EXPLAIN_LOOK_S = 0.1
"""How long an end may take to be explained: a service that was not run in the meantime has missed but one look."""

log = structlog.get_logger()


class RankStartError(Exception):
    """A rank did not become ready; the message says why."""


class RankLink:
    """Starts a rank, reads its reports and tells when it is gone.

    Each rank has a socket of its own, so that a connection needs no introduction.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        socket_path: Path,
        log_path: Path | None,
        on_reports: Callable[[list[messages.Report]], None],
    ) -> None:
        self.name = name
        self.last_report_at = time.monotonic()
        self._argv = [*argv, "--socket", str(socket_path)]
        self._env = dict(env)
        self._socket_path = socket_path
        self._log_path = log_path
        self._on_reports = on_reports
        self._ready: asyncio.Future[messages.RankReady] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: ChildProcess | None = None
        self._listener: Listener | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._last_words = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """Of the process; 0 before it was started."""
        return self._process.pid if self._process else 0

    async def start(self, timeout_s: float) -> messages.RankReady:
        """Spawns the process and waits for its RankReady; raises RankStartError."""
        self._listener = self._listen()
        self._process = ChildProcess(self._argv, self._env, self._log_path)
        self._tasks.append(asyncio.create_task(self._wait_exit(), name=f"{self.name} exit"))
        waiting: list[asyncio.Future[messages.RankReady] | asyncio.Future[str]] = [self._ready, self._gone]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if self._gone.done():
            raise RankStartError(f"{self.name} {self._gone.result()}")
        raise RankStartError(f"{self.name} was not ready within {timeout_s:g} s")

    def send(self, commands: Sequence[messages.Command]) -> None:
        """Queues commands in one frame; a rank that is gone takes none."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_frame(messages.encode(list(commands))))

    async def gone(self) -> str:
        """Waits until the process has ended or its socket is closed; returns why, in words."""
        return await asyncio.shield(self._gone)

    async def kill(self) -> None:
        """Ends the process at once and frees socket and tasks; may be called at any time."""
        if self._process is not None:
            self._process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._process.wait()
        if self._listener is not None:
            await self._listener.close()
        if self._writer is not None:
            # Nobody reads what waits to be sent.
            self._writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket_path.unlink(missing_ok=True)
        self._end("was ended by its service")
        if not self._ready.done():
            self._ready.cancel()

    def _listen(self) -> Listener:
        bound = socket.socket(socket.AF_UNIX)
        self._socket_path.unlink(missing_ok=True)
        try:
            bound.bind(str(self._socket_path))
        except OSError:
            bound.close()
            raise
        loop = asyncio.get_running_loop()
        return Listener(
            bound, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), self._accept, loop=loop)
        )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            writer.close()
            return
        self._writer = writer
        self._reader = asyncio.create_task(self._read(reader), name=f"{self.name} reports")
        self._tasks.append(self._reader)
        self._connected.set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (body := await read_frame(reader)) is not None:
                self.last_report_at = time.monotonic()
                self._take(messages.decode_reports(body))
        except (FrameError, msgspec.DecodeError) as error:
            self._end(f"sent a malformed report: {error}")
        except Exception as error:
            log.error("reports could not be handled", rank=self.name, exc_info=error)
            self._end(f"sent reports that could not be handled: {type(error).__name__}")
        else:
            await self._say_why_gone()

    def _take(self, reports: list[messages.Report]) -> None:
        for report in reports:
            if isinstance(report, messages.RankFailed):
                self._last_words = report.message
            elif isinstance(report, messages.RankReady) and not self._ready.done():
                self._ready.set_result(report)
        self._on_reports(reports)

    async def _say_why_gone(self) -> None:
        """The socket closed; the exit status that explains it follows within moments, if the process did end."""
        assert self._process is not None, "a rank reports only after it was started"
        for _ in range(EXPLAIN_LOOKS):
            if not self._process.running:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPLAIN_LOOK_S):
                    await self._process.wait()
        self._end("closed its socket" if self._process.running else self._process.exit_words)

    async def _wait_exit(self) -> None:
        assert self._process is not None, "the process was started"
        await self._process.wait()
        # Its last words may still be in the socket, or in a connection that is not accepted yet.
        for _ in range(EXPLAIN_LOOKS):
            if self._reader is None:
                await wait_up_to(self._connected, EXPLAIN_LOOK_S)
            elif not self._reader.done():
                await asyncio.wait([self._reader], timeout=EXPLAIN_LOOK_S)
        self._end(self._process.exit_words)

    def _end(self, reason: str) -> None:
        if not self._gone.done():
            self._gone.set_result(f"{reason}: {self._last_words}" if self._last_words else reason)
