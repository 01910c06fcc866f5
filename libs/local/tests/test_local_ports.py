"""Ports that a server is told before it listens."""

import socket

import pytest

from tidemill_local import ports


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    first, _ = map(int, ports.OUTGOING.read_text().split())
    if first <= ports.FIRST_PORT:
        pytest.skip("the kernel takes ports of all sizes here")
    chosen = {ports.free_port() for _ in range(20)}
    assert all(ports.FIRST_PORT <= port < first for port in chosen)
    assert len(chosen) > 1


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST_PORT", port)
        monkeypatch.setattr(ports, "_first_outgoing_port", lambda: port + 1)
        # None is left but the kernel's.
        assert ports.free_port() != port
        assert not ports.is_listening("127.0.0.1", port)
