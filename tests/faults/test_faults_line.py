"""The line that network faults cut: what it took it gives back, however it ends."""

import os
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from harness.proxy import shared_line

CLIENTS = 20


def _echo(listener: socket.socket) -> None:
    """Answers one message of each connection, one connection after another, until the listener is shut."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(connection.recv(16))


def _sockets() -> set[str]:
    """This process's own, each by its inode."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {target for target in found if target.startswith("socket:")}


@pytest.mark.parametrize("cut", [False, True])
def test_a_line_that_ends_leaves_no_connection(cut: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as clients:
        server = threading.Thread(target=_echo, args=(listener,))
        server.start()
        before = _sockets()
        with shared_line(f"127.0.0.1:{listener.getsockname()[1]}", "127.0.0.1") as line:
            host, _, port = line.address.rpartition(":")
            known = clients.enter_context(socket.create_connection((host, int(port))))
            known.sendall(b"over")
            assert known.recv(16) == b"over"
            if cut:
                line.cut()
            # These come while the line ends: some are taken, some are not.
            for _ in range(CLIENTS):
                clients.enter_context(socket.create_connection((host, int(port))))
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
        clients.close()
        assert not _sockets() - before
