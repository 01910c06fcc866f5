"""Steps from the leader of a domain to its followers, over a local socket: no collective, so an idle domain is free."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from tidemill_engine.step import SchedulerOutput

_STEP, _HEARTBEAT, _QUIT = b"s", b"h", b"q"
_LENGTH_BYTES = 4
_CONNECT_POLL_S = 0.05


class PeerLost(Exception):
    """A rank of the domain is gone."""


class StepLeader:
    """Hands each step to every follower; a follower that goes away is reported at once, also while idle."""

    def __init__(self, path: str, num_followers: int, on_lost: Callable[[str], None]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._on_lost = on_lost
        self._num_followers = num_followers
        self._followers: dict[int, socket.socket] = {}
        self._closing = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(num_followers)

    def accept(self, timeout_s: float) -> None:
        """Waits until every follower is there; raises PeerLost after `timeout_s`."""
        self._listener.settimeout(timeout_s)
        try:
            while len(self._followers) < self._num_followers:
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                rank = _receive_exactly(connection, 1)[0]
                self._followers[rank] = connection
                threading.Thread(target=self._watch, args=(rank, connection), name=f"rank-{rank}", daemon=True).start()
        except TimeoutError as error:
            missing = sorted(set(range(1, self._num_followers + 1)) - set(self._followers))
            raise PeerLost(f"ranks {missing} did not join within {timeout_s:g} s") from error

    def send_step(self, out: SchedulerOutput) -> None:
        """Followers begin to run the step."""
        self._broadcast(_STEP, self._encoder.encode(out))

    def send_heartbeat(self) -> None:
        """Tells followers that the leader lives."""
        self._broadcast(_HEARTBEAT, b"")

    def close(self) -> None:
        """Followers end."""
        self._closing = True
        with contextlib.suppress(PeerLost):
            self._broadcast(_QUIT, b"")
        for connection in self._followers.values():
            connection.close()
        self._listener.close()

    def _broadcast(self, kind: bytes, body: bytes) -> None:
        frame = len(body).to_bytes(_LENGTH_BYTES, "little") + kind + body
        for rank, connection in self._followers.items():
            try:
                connection.sendall(frame)
            except OSError as error:
                raise PeerLost(f"rank {rank} of the domain is gone: {error}") from error

    def _watch(self, rank: int, connection: socket.socket) -> None:
        """Followers send nothing, so that reading ends only with them."""
        with contextlib.suppress(OSError):
            connection.recv(1)
        if not self._closing:
            self._on_lost(f"rank {rank} of the domain is gone")


class StepFollower:
    """A follower's end: takes steps until the leader quits."""

    def __init__(self, path: str, rank: int, connect_timeout_s: float, watchdog_s: float) -> None:
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._watchdog_s = watchdog_s
        self._socket = _connect(path, connect_timeout_s)
        self._socket.sendall(bytes([rank]))
        # The leader may still be loading: the watchdog begins with its first frame.
        self._socket.settimeout(max(connect_timeout_s, watchdog_s))

    def receive_step(self) -> SchedulerOutput | None:
        """The next step; None when the leader quits; raises PeerLost when it is gone or silent for `watchdog_s`."""
        while True:
            try:
                header = _receive_exactly(self._socket, _LENGTH_BYTES + 1)
                body = _receive_exactly(self._socket, int.from_bytes(header[:_LENGTH_BYTES], "little"))
            except TimeoutError as error:
                raise PeerLost(f"the leader of the domain was silent for {self._watchdog_s:g} s") from error
            self._socket.settimeout(self._watchdog_s)
            kind = header[_LENGTH_BYTES:]
            if kind == _QUIT:
                return None
            if kind == _STEP:
                return self._decoder.decode(body)

    def close(self) -> None:
        """Leaves."""
        self._socket.close()


def _connect(path: str, timeout_s: float) -> socket.socket:
    ends_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            if time.monotonic() >= ends_s:
                raise PeerLost(f"no leader listens at {path} after {timeout_s:g} s") from error
            time.sleep(_CONNECT_POLL_S)
        else:
            return connection


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        try:
            part = connection.recv(num_bytes)
        except ConnectionResetError as error:
            raise PeerLost("the other rank is gone") from error
        if not part:
            raise PeerLost("the other rank is gone")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
