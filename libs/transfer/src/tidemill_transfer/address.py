"""Addresses of agents: `ucx://HOST:PORT/INCARNATION`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill_transfer.errors import TransferError


@dataclass(frozen=True)
class AgentAddress:
    """Where an agent listens and which of its runs is meant: another run of the same port refuses the handshake."""

    transport: str
    host: str
    port: int
    incarnation: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}/{self.incarnation}"


def parse_address(text: str) -> AgentAddress:
    """Reads an address; TransferError "unavailable" when it is not one."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise TransferError("unavailable", f"not an agent address: {text!r}") from error
    incarnation = parts.path.strip("/")
    if not parts.scheme or not parts.hostname or not port or not incarnation:
        raise TransferError("unavailable", f"not an agent address: {text!r}")
    return AgentAddress(parts.scheme, parts.hostname, port, incarnation)
