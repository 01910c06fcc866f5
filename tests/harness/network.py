"""A network namespace beside the machine's own; a test cuts the line between them without telling either side."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

TIMEOUT_S = 20
# An Ethernet address that nobody has: packets to it are lost without an error, as on a cut line.
NOBODY = "02:00:00:00:00:fe"


class NotPermitted(Exception):
    """This machine lets us make no namespaces; the message holds what `ip` said."""


def ip(*arguments: str) -> str:
    """Runs iproute2's `ip`."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise NotPermitted(str(error)) from error
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Line:
    """The namespace and both ends of the line."""

    namespace: str
    near_device: str
    far_device: str
    near: str
    far: str

    def inside(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs in the namespace and listens there."""
        moved = [f"--host={self.far}" if argument == f"--host={self.near}" else argument for argument in argv]
        return ["ip", "netns", "exec", self.namespace, *moved]

    def cut(self) -> None:
        """From now on packets vanish in both directions."""
        self._send_to(NOBODY, NOBODY)

    def mend(self) -> None:
        """Packets arrive again."""
        self._send_to(address_of(self.near_device), address_of(self.far_device, self.namespace))

    def _send_to(self, near_address: str, far_address: str) -> None:
        """Sets which Ethernet addresses the two ends send to."""
        fixed = ("nud", "permanent")
        ip("neigh", "replace", self.far, "lladdr", far_address, "dev", self.near_device, *fixed)
        ip("-n", self.namespace, "neigh", "replace", self.near, "lladdr", near_address, "dev", self.far_device, *fixed)


def address_of(device: str, namespace: str = "") -> str:
    """Ethernet address of a device."""
    where = ("-n", namespace) if namespace else ()
    [link] = json.loads(ip(*where, "-j", "link", "show", "dev", device))
    return str(link["address"])


@contextmanager
def lined_namespace() -> Iterator[Line]:
    """Makes a namespace with a line to it, removes both afterwards; NotPermitted if the machine refuses."""
    number = os.getpid()
    # Of the range for benchmarks of devices (RFC 2544), which no machine uses otherwise.
    net, first = f"198.18.{number // 64 % 256}", number % 64 * 4
    line = Line(f"tm-{number}", f"tmn{number}", f"tmf{number}", f"{net}.{first + 1}", f"{net}.{first + 2}")
    ip("netns", "add", line.namespace)
    try:
        ip("link", "add", line.near_device, "type", "veth", "peer", "name", line.far_device, "netns", line.namespace)
        ip("addr", "add", f"{line.near}/30", "dev", line.near_device)
        ip("-n", line.namespace, "addr", "add", f"{line.far}/30", "dev", line.far_device)
        ip("link", "set", line.near_device, "up")
        for device in ("lo", line.far_device):
            ip("-n", line.namespace, "link", "set", device, "up")
        yield line
    finally:
        ip("netns", "del", line.namespace)
