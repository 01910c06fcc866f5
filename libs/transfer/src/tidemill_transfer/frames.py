"""Frames of the socket that joins two agents: its handshake, its control messages and, for tcp, its bytes.

| type: u8 | tag: u64 | length: u32 | payload: length bytes |      little endian
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import IntEnum

HEADER = struct.Struct("<BQI")
MAX_CONTROL_BYTES = 1 << 16
CHUNK_BYTES = 512 << 10

KEEPALIVE_IDLE_S = 2
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_COUNT = 3
UNACKNOWLEDGED_MS = 10_000


class FrameType(IntEnum):
    """HELLO, WELCOME and REFUSED open a link; the others run on it."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    WITHDRAW = 4
    """The sender takes the message of this tag back."""
    OFFER = 5
    """tcp: a message of `length` (payload: u64) is ready."""
    GRANT = 6
    """tcp: the receiver waits for the message with a buffer of its size."""
    DECLINE = 7
    """tcp: nobody wants the message."""
    CHUNK = 8
    """tcp: the next bytes of a granted message."""


_TYPES = frozenset(int(kind) for kind in FrameType)


def encode_frame(kind: FrameType, tag: int = 0, payload: bytes = b"") -> bytes:
    """A whole small frame."""
    return HEADER.pack(kind, tag, len(payload)) + payload


def prepare_socket(sock: socket.socket) -> None:
    """Makes a socket notice dead peers and cut links (idle or not), and send small frames at once."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


class FrameReader:
    """Reads whole frames from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read_header(self) -> tuple[FrameType, int, int]:
        """(type, tag, payload length) of the next frame; OSError at the end of the stream or when it is not ours."""
        kind, tag, length = HEADER.unpack(await self.read_bytes(HEADER.size))
        if kind not in _TYPES or length > (CHUNK_BYTES if kind == FrameType.CHUNK else MAX_CONTROL_BYTES):
            raise ConnectionError("the peer does not speak the transfer protocol")
        return FrameType(kind), tag, length

    async def read_bytes(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        buffer = bytearray(size)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, view: memoryview) -> None:
        """Fills the view."""
        while len(view):
            size = await self._loop.sock_recv_into(self._sock, view)
            if size == 0:
                raise ConnectionResetError("the peer closed the connection")
            view = view[size:]


class FrameWriter:
    """Writes frames in order from a queue, so that any number of senders share the socket frame by frame."""

    def __init__(self, sock: socket.socket, on_error: Callable[[str], None]) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._queue: asyncio.Queue[tuple[bytes, memoryview | None, asyncio.Future[None] | None]] = asyncio.Queue()
        self._task = asyncio.create_task(self._write_frames(), name="transfer-frames")

    def post(self, kind: FrameType, tag: int = 0, payload: bytes = b"") -> None:
        """Queues a small frame."""
        self._queue.put_nowait((encode_frame(kind, tag, payload), None, None))

    def post_chunk(self, tag: int, chunk: memoryview) -> "asyncio.Future[None]":
        """Queues a chunk; its buffer must stay as it is until the future is done or cancelled."""
        done: asyncio.Future[None] = self._loop.create_future()
        if self._task.done():
            done.cancel()
        else:
            self._queue.put_nowait((HEADER.pack(FrameType.CHUNK, tag, len(chunk)), chunk, done))
        return done

    async def _write_frames(self) -> None:
        while True:
            head, body, done = await self._queue.get()
            try:
                await self._loop.sock_sendall(self._sock, head)
                if body is not None:
                    await self._loop.sock_sendall(self._sock, body)
                if done is not None and not done.done():
                    done.set_result(None)
            except OSError as error:
                self._on_error(str(error))
                return
            finally:
                if done is not None and not done.done():
                    done.cancel()

    async def close(self) -> None:
        """Stops writing; chunks that wait are cancelled."""
        self._task.cancel()
        await asyncio.wait([self._task])
        while not self._queue.empty():
            _, _, done = self._queue.get_nowait()
            if done is not None and not done.done():
                done.cancel()
