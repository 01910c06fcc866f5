"""What an ASGI app cannot say or hear: that a client has gone, at once, and that its connection is to be cut."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SCOPE_KEY = "tidemill.connection"


class Connection:
    """One accepted connection; requests on it come one after another."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lost = False
        self.on_lost: Callable[[], None] | None = None
        self._transport = transport

    def cut(self) -> None:
        """Drops the connection and what is still to be sent."""
        self._transport.abort()

    def notify_lost(self) -> None:
        """The client has gone."""
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()


class ApiProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the connection in the scope."""

    connection: Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.connection = Connection(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or this side, has closed."""
        super().connection_lost(exc)
        self.connection.notify_lost()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[SCOPE_KEY] = self.connection
