"""The seam of this package: an agent sends and receives tagged messages and never hangs.

`send` returns when the bytes have left the sender's buffer; only the receiver knows that they arrived whole, so callers
acknowledge over their own control channel.
"""

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tidemill_transfer.errors import TransferError, TransportUnavailable
from tidemill_transfer.tags import new_tag, new_tags

Bytes = npt.NDArray[np.uint8]
TransportName = Literal["ucx", "tcp"]

__all__ = [
    "Bytes",
    "TransferAgent",
    "TransferError",
    "TransportName",
    "TransportUnavailable",
    "new_tag",
    "new_tags",
    "open_agent",
]


class TransferAgent(Protocol):
    """One for each process, on one asyncio loop."""

    @property
    def address(self) -> str:
        """`ucx://HOST:PORT/INCARNATION` or `tcp://...`, for peers."""

    @property
    def takes_device_memory(self) -> bool:
        """Buffers may lie on a CUDA device."""

    @property
    def holds(self) -> dict[str, int]:
        """What is held now: links, sends, receives (all 0 after load but links), unclaimed messages."""

    async def send(self, peer_address: str, tag: int, data: memoryview | Bytes, deadline_s: float) -> None:
        """Sends one message; either side may be first. TransferError at the deadline at the latest."""

    async def recv(self, peer_address: str, tag: int, out: Bytes, deadline_s: float) -> None:
        """Receives the message of exactly out.nbytes that the peer sends under `tag`."""

    async def close(self) -> None:
        """Ends all operations with "peer_lost" and releases everything."""


async def open_agent(transport: TransportName, host: str, *, advertise_host: str = "") -> TransferAgent:
    """Opens the named transport on `host`; raises TransportUnavailable, never takes another one."""
    if transport == "ucx":
        from tidemill_transfer.ucx import open_ucx_agent

        ucx: TransferAgent = await open_ucx_agent(host, advertise_host)
        return ucx
    if transport == "tcp":
        from tidemill_transfer.tcp import open_tcp_agent

        tcp: TransferAgent = await open_tcp_agent(host, advertise_host)
        return tcp
    raise TransportUnavailable(f"no transport is called {transport!r}; there are ucx and tcp")
