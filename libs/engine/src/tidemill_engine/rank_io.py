"""The I/O thread of a rank: the socket to its service and the transfer agent, on a loop of their own."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import structlog
import uvloop

from tidemill_engine.host_pool import HostPool
from tidemill_engine.messages import (
    CancelTransfer,
    Command,
    EngineError,
    LoadHost,
    RankFailed,
    RecvKV,
    Report,
    SaveHost,
    SendKV,
    Shutdown,
    TransferFailed,
    decode_commands,
    encode,
)
from tidemill_engine.rank_transfers import RankTransfers, TransferCommand
from tidemill_engine.scheduler import SchedulerCommand
from tidemill_engine.settings import EngineSettings
from tidemill_engine.transfer_pool import Pool
from tidemill_transfer.agent import TransferAgent, open_agent

log = structlog.get_logger("tidemill.rank_io")

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 256 << 20
_MAX_UNSENT_BYTES = 256 << 20
_FLUSH_S = 2.0


EngineCommand = SchedulerCommand | Shutdown


class Inbox:
    """Commands for the engine's thread, which blocks on it when idle."""

    def __init__(self) -> None:
        self._commands: deque[EngineCommand] = deque()
        self._changed = threading.Condition()

    def put(self, commands: list[EngineCommand]) -> None:
        """Adds commands and wakes the engine."""
        with self._changed:
            self._commands.extend(commands)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[EngineCommand]:
        """All commands; waits for one at most `timeout_s`."""
        with self._changed:
            if not self._commands and timeout_s > 0:
                self._changed.wait(timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            return commands


class RankIO:
    """Owns the thread. `on_lost` is called on it, once, when the service is gone or the thread cannot go on."""

    def __init__(self, settings: EngineSettings, socket_path: str, on_lost: Callable[[str], None]) -> None:
        self.inbox = Inbox()
        self._settings = settings
        self._socket_path = socket_path
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rank-io", daemon=True)
        self._started = threading.Event()
        self._stopping = asyncio.Event()
        self._start_error: Exception | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._agent: TransferAgent | None = None
        self._transfers: RankTransfers | None = None

    @property
    def transfer_address(self) -> str:
        """Where peers reach this rank."""
        assert self._agent is not None, "the thread has not started"
        return self._agent.address

    def start(self) -> None:
        """Connects to the service and opens the transfer agent; raises what went wrong."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def attach_pool(self, pool: Pool, host: HostPool | None = None) -> None:
        """Transfers are possible from here on; `host` is L2."""
        assert self._agent is not None, "the thread has not started"
        self._transfers = RankTransfers(self._agent, pool, self._settings.transfer_limit_s, self._report, host)

    def send(self, reports: list[Report]) -> None:
        """Queues a frame; callable from any thread."""
        self._loop.call_soon_threadsafe(self._write, reports)

    def close(self) -> None:
        """Sends what is queued and ends the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_FLUSH_S + self._settings.transfer_limit_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:
            if not self._started.is_set():
                self._start_error = error
                self._started.set()
                return
            log.exception("io_thread_failed")
            self._on_lost(f"the I/O thread failed: {error}")

    async def _main(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._socket_path)
        try:
            self._agent = await open_agent(self._settings.transport, self._settings.host)
        except Exception as error:
            # This loop ends with the error: nothing else could tell the service why.
            self._report(RankFailed(self._settings.rank, str(error)))
            await self._flush()
            raise
        self._started.set()
        reading = asyncio.create_task(self._read(reader))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not self._stopping.is_set():
            reading.result()
            self._on_lost("the service closed the socket")
        for task in (reading, stopping):
            task.cancel()
        await asyncio.gather(reading, stopping, return_exceptions=True)
        if self._transfers is not None:
            await self._transfers.close()
        await self._agent.close()
        await self._flush()

    async def _flush(self) -> None:
        assert self._writer is not None
        self._writer.close()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError) as error:
            log.warning("reports_not_flushed", reason=str(error))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Takes frames until the service closes the socket."""
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes is over the limit of {_MAX_FRAME_BYTES}")
                body = await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                # Also of a write to a service that was killed: the stream keeps one error for both directions.
                return
            try:
                self._dispatch(decode_commands(body))
            except msgspec.MsgspecError as error:
                raise ValueError(f"the service sent a frame that is no list of commands: {error}") from error

    def _dispatch(self, commands: list[Command]) -> None:
        """Transfers are handled here, the rest goes to the engine."""
        for_engine: list[EngineCommand] = []
        for command in commands:
            if isinstance(command, SendKV | RecvKV | SaveHost | LoadHost):
                self._start_transfer(command)
            elif isinstance(command, CancelTransfer):
                if self._transfers is not None:
                    self._transfers.cancel(command.transfer_id)
            else:
                for_engine.append(command)
        if for_engine:
            self.inbox.put(for_engine)

    def _start_transfer(self, command: TransferCommand) -> None:
        if self._transfers is None:
            error = EngineError("UNAVAILABLE", "the rank is not ready")
            self._report(TransferFailed(command.transfer_id, error))
            return
        self._transfers.start(command)

    def _report(self, report: Report) -> None:
        self._write([report])

    def _write(self, reports: list[Report]) -> None:
        if self._writer is None or self._writer.is_closing():
            return
        body = encode(reports)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._on_lost("the service does not read its socket")
