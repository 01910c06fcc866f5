"""Free TCP ports."""

import random
import socket
from pathlib import Path

FIRST_PORT = 20_000
"""Below it are the usual ports of services."""
ATTEMPTS = 100
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment and that the kernel gives to no outgoing connection.

    A server is told its port before it listens, and comes back at it: until then a connection of any process, even one
    that looks for that server, could be given the same port by the kernel.
    """
    ports = range(FIRST_PORT, _first_outgoing_port())
    # Not by a seed that a process may share with others: each is to try ports of its own.
    for port in random.SystemRandom().sample(ports, min(ATTEMPTS, len(ports))):
        if _can_listen(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(OUTGOING.read_text().split()[0])
    except OSError:
        return FIRST_PORT


def _can_listen(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_listening(host: str, port: int) -> bool:
    """True if something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
